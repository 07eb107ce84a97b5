import pytest
import torch

from roseinfer.kernels.common.inputs import expand_rows, expand_rows_reference

SEATS, LENGTH, GROUPS = 6, 200, 2
POISON = -(2**30)


def expand(function, rows, block_size, device, padding=0, *, drafted=False, adapted=False):
    """Return the five outputs, poisoned before, the pool, and slots of adapters if `adapted`. rows: (seat, start,
    count, write_from). padding: more columns of layout. drafted: each third token is a draft.
    """
    generator = torch.Generator().manual_seed(5)
    pool = torch.randint(0, 50000, (SEATS, LENGTH + 1), dtype=torch.int32, generator=generator).to(device)
    blocks = -(-LENGTH // block_size)
    shape = (GROUPS, SEATS, blocks)
    tables = torch.randint(0, 2**31 // 16 - 1, shape, dtype=torch.int32, generator=generator).to(device)
    first, fields, token_rows = 0, [], []
    for i, (seat, start, count, write_from) in enumerate(rows):
        fields.append([seat, start, first, write_from, count])
        token_rows += [i] * count
        first += count
    layout = torch.full((5, len(rows) + padding), 99, dtype=torch.int32)
    layout[:, : len(rows)] = torch.tensor(fields, dtype=torch.int32).T
    tokens = torch.tensor(token_rows, dtype=torch.int32, device=device)
    wide = [torch.full((*more, first + 3), POISON, dtype=torch.int64, device=device) for more in ((), (), (GROUPS,))]
    narrow = [torch.full((len(rows) + n,), POISON, dtype=torch.int32, device=device) for n in (3, 4)]
    outputs = [w[..., :first] for w in wide] + [narrow[0][: len(rows)], narrow[1][: len(rows) + 1]]
    drafts = torch.full_like(tokens, -1)
    if drafted:
        drafts[2::3] = torch.arange(len(drafts[2::3]), device=device)
    slots = torch.arange(SEATS, dtype=torch.int32, device=device) - 2 if adapted else None
    adapters = torch.full_like(tokens, POISON) if adapted else None
    function(layout.to(device), tokens, drafts, pool, tables, block_size, *outputs, slots, adapters)
    assert all((w[..., first:] == POISON).all() for w in wide)
    assert (narrow[0][len(rows) :] == POISON).all() and (narrow[1][len(rows) + 1 :] == POISON).all()
    return [*outputs, pool, *([] if adapters is None else [adapters])]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    "rows",
    [
        [(2, 0, 1, 0)],
        [(0, 199, 1, 0), (5, 16, 1, 0), (3, 15, 1, 0)],
        [(1, 0, 200, 0)],
        [(4, 7, 1, 0), (4, 8, 1, 9), (0, 30, 130, 64), (1, 3, 60, 63), (2, 100, 1, 0)],
        [(i % SEATS, i, 1, 0) for i in range(190)],
    ],
    ids=["one", "decodes", "whole", "mixed", "many"],
)
def test_expand(rows, block_size, device):
    for padding, drafted in ((0, False), (5, True)):
        ours = expand(expand_rows, rows, block_size, device, padding, drafted=drafted, adapted=drafted)
        theirs = expand(expand_rows_reference, rows, block_size, device, drafted=drafted, adapted=drafted)
        for got, expected in zip(ours, theirs, strict=True):
            assert torch.equal(got, expected)


def test_by_hand(device):
    rows = [(3, 17, 1, 0), (2, 15, 4, 17)]
    input_ids, positions, slots, context_len, query_start, unchanged = expand(expand_rows, rows, 16, device)
    generator = torch.Generator().manual_seed(5)
    pool = torch.randint(0, 50000, (SEATS, LENGTH + 1), dtype=torch.int32, generator=generator)
    tables = torch.randint(0, 2**31 // 16 - 1, (GROUPS, SEATS, 13), dtype=torch.int32, generator=generator).long()
    assert input_ids.tolist() == [pool[3, 17], *pool[2, 15:19].tolist()] and torch.equal(unchanged.cpu(), pool)
    assert positions.tolist() == [17, 15, 16, 17, 18]
    for found, table in zip(slots, tables, strict=True):
        assert found.tolist() == [table[3, 1] * 16 + 1, -1, -1, table[2, 1] * 16 + 1, table[2, 1] * 16 + 2]
    assert context_len.tolist() == [18, 19] and query_start.tolist() == [0, 1, 5]


def test_adapters_by_hand(device):
    """Seat s has slot s - 2."""
    *_, adapters = expand(expand_rows, [(3, 17, 1, 0), (0, 15, 3, 0), (2, 4, 1, 0)], 16, device, adapted=True)
    assert adapters.tolist() == [1, -2, -2, -2, 0]


def test_drafts_are_inputs_and_known_tokens_afterwards(device):
    rows = [(3, 17, 1, 0), (2, 15, 4, 17)]
    plain, drafted = (expand(expand_rows, rows, 16, device, drafted=drafted) for drafted in (False, True))
    assert drafted[0].tolist() == [*plain[0][:2].tolist(), 0, *plain[0][3:].tolist()]
    plain[5][2, 16] = 0
    assert torch.equal(plain[5], drafted[5]) and all(map(torch.equal, plain[1:5], drafted[1:5]))


def test_rows_without_tokens(device):
    """A layout that is padded beyond the step's rows has such rows."""
    rows = [(3, 17, 2, 0), (0, 0, 0, 0), (0, 0, 0, 0)]
    ours = expand(expand_rows, rows, 16, device)
    assert ours[1].tolist() == [17, 18]
    assert ours[3].tolist() == [19, 0, 0] and ours[4].tolist() == [0, 2, 2, 2]
