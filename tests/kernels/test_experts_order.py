"""`order_pairs` against sorting, however the experts are chosen."""

import pytest
import torch

from roseinfer.kernels.experts_order import order_pairs, order_reference

EXPERTS = 12


def uniform(tokens):
    return torch.rand(tokens, EXPERTS).argsort(1)[:, :3].int()


CHOICES = {
    "one token": uniform(1),
    "some": uniform(7),
    "just a block of pairs": uniform(1024)[:, :2].contiguous(),
    "all to the same": torch.tensor([[11, 0, 4]], dtype=torch.int32).repeat(50, 1),
    "one of each": torch.arange(EXPERTS, dtype=torch.int32)[:, None],
    "tiles just full": torch.arange(64, dtype=torch.int32)[:, None] // 16,
    "more than a block of pairs, more tiles than places together": torch.arange(16400, dtype=torch.int32)[:, None] % 3,
}


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("ids", CHOICES.values(), ids=CHOICES)
def test_pairs_are_sorted_and_cut(ids, tile, device):
    found, expected = order_pairs(ids.to(device), EXPERTS, tile), order_reference(ids, EXPERTS, tile)
    assert torch.equal(found.pairs.cpu(), expected.pairs)
    experts, starts, ends = found.tiles.cpu()
    assert torch.equal(starts, expected.tiles[1]) and torch.equal(ends, expected.tiles[2])
    full = starts < ends
    assert torch.equal(experts[full], expected.tiles[0][full])
    assert torch.where(full, (ends - starts).clamp(max=tile), 0).sum() == ids.numel(), "each row is in one tile"


def test_an_id_that_is_none_leads_nowhere(device):
    """A router that computed with NaN must not have anybody read outside a matrix."""
    ids = torch.tensor([[0, 3], [-7, EXPERTS], [3, 2**30]], dtype=torch.int32, device=device)
    found = order_pairs(ids, EXPERTS, 16)
    experts, starts, ends = found.tiles.cpu()
    full = starts < ends
    assert experts[full].tolist() == [0, 3] and (ends - starts)[full].tolist() == [1, 2]
    assert starts.min() >= 0 and ends.max() <= ids.numel()
    rows = [row for start, end in zip(starts, ends, strict=True) for row in range(start, end)]
    assert sorted(found.pairs.cpu()[rows].tolist()) == [0, 1, 4]
