"""`order_pairs` against sorting, however the experts are chosen."""

import pytest
import torch

from roseinfer.kernels.experts.pair_order import OrderConfig, order_pairs, order_reference
from tests.helpers.cases import cases, each_value

EXPERTS = 12


def uniform(tokens):
    return torch.rand(tokens, EXPERTS).argsort(1)[:, :3].int()


CHOICES = {
    "one token": uniform(1),
    "some": uniform(7),
    "just a block of pairs": uniform(1024)[:, :2].contiguous(),
    "one more than a larger block": uniform(2049)[:, :2].contiguous(),
    "all to the same": torch.tensor([[11, 0, 4]], dtype=torch.int32).repeat(50, 1),
    "one of each": torch.arange(EXPERTS, dtype=torch.int32)[:, None],
    "tiles just full": torch.arange(64, dtype=torch.int32)[:, None] // 16,
}
# Chunks of which the last is short, more than are added up at once, and one with all pairs.
CONFIGS = {"default": None} | {f"chunks of {chunk}": OrderConfig(4, 4, chunk) for chunk in (3, 40, 40000)}


def check(ids, experts, tile, device, config=None):
    found, expected = order_pairs(ids.to(device), experts, tile, config), order_reference(ids, experts, tile)
    assert torch.equal(found.pairs.cpu(), expected.pairs)
    numbers, starts, ends = found.tiles.cpu()
    assert torch.equal(starts, expected.tiles[1]) and torch.equal(ends, expected.tiles[2])
    full = starts < ends
    assert torch.equal(numbers[full], expected.tiles[0][full])
    assert torch.where(full, (ends - starts).clamp(max=tile), 0).sum() == ids.numel(), "each row is in one tile"


@each_value(ids=CHOICES, tile=[16, 64])
def test_pairs_are_sorted_and_cut(ids, tile, device):
    check(ids, EXPERTS, tile, device)


@cases(("pairs", "config"), [(1600, None), (1600, OrderConfig(4, 4, 400))], exhaustive=[(8224, None)])
def test_more_tiles_than_are_filled_together(pairs, config, device):
    check(torch.arange(pairs, dtype=torch.int32)[:, None] % 3, EXPERTS, 16, device, config)


@each_value(size=[(12, 3), (1, 1), (128, 8), (200, 16)], config=CONFIGS)
def test_any_number_of_experts_in_chunks(size, config, device):
    """Some experts are chosen far more often than others."""
    experts, top_k = size
    shares = torch.rand(40, experts) / (1 + torch.arange(experts))
    check(shares.argsort(1, descending=True)[:, :top_k].int().contiguous(), experts, 16, device, config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("experts", [12, 16])
def test_invalid_ids_are_skipped(experts, config, device):
    """A router that computed with NaN must not cause reads outside of a matrix."""
    ids = torch.tensor([[0, 3], [-7, experts], [3, 2**30]], dtype=torch.int32, device=device)
    found = order_pairs(ids, experts, 16, config)
    numbers, starts, ends = found.tiles.cpu()
    full = starts < ends
    assert numbers[full].tolist() == [0, 3] and (ends - starts)[full].tolist() == [1, 2]
    assert starts.min() >= 0 and ends.max() <= ids.numel()
    rows = [row for start, end in zip(starts, ends, strict=True) for row in range(start, end)]
    assert found.pairs.cpu()[rows].tolist() == [0, 1, 4]
