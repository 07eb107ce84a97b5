"""Kernels of adapters for any number of rows, against float64."""

import pytest
import torch

from roseinfer.kernels.lora.expand import expand, expand_reference
from roseinfer.kernels.lora.shrink import MAX_ROWS, num_parts, shrink, shrink_reference, tile_rows
from tests.helpers.cases import pairwise
from tests.helpers.slot_matrices import FEW_RANKS, RANKS, WIDTHS, exact_delta, slot_matrices, slots_of_rows

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def case(device, rows, in_features, widths, dtype, **options):
    matrices = slot_matrices(device, in_features, widths, dtype, **options)
    x = torch.randn(rows, in_features).to(dtype).to(device)
    y = torch.randn(rows, sum(widths)).to(dtype).to(device)
    return x, y, slots_of_rows(device, rows, len(matrices.ranks)), matrices


def check(out, y, added, slots):
    base = slots < 0
    assert torch.equal(out[base], y[base])
    expected = y.double() + added
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error < TOLERANCE[out.dtype]).all(), error  # NaN fails too


@pairwise(
    rows=[1, 2, 7, MAX_ROWS, MAX_ROWS + 1, 64, 300],
    widths=WIDTHS,
    in_features=[96, 200, 1100],
    ranks=[RANKS, FEW_RANKS],
    dtype=[torch.float32, torch.float16],
)
def test_outputs(device, rows, widths, in_features, ranks, dtype):
    x, y, slots, matrices = case(device, rows, in_features, widths, dtype, ranks=ranks, max_rank=max(ranks))
    out = expand(y.clone(), shrink(x, slots, matrices))
    check(out, y, exact_delta(x, slots, matrices), slots)


def test_sums_in_bfloat16(device):
    x, _, slots, matrices = case(device, 5, 128, (24,), torch.bfloat16)
    sums, expected = shrink(x, slots, matrices), shrink_reference(x, slots, matrices)
    for row, slot in enumerate(slots.tolist()):
        rank = int(matrices.ranks[slot]) if slot >= 0 else 0
        torch.testing.assert_close(sums.values[0, row, :rank], expected.values[0, row, :rank])


@pytest.mark.parametrize("in_features", [64, 4100])
def test_norm_before_few_rows(device, in_features):
    """One row is large, so that a norm of a wrong row shows."""
    x, y, slots, matrices = case(device, 7, in_features, (24,), torch.float16)
    x[3] *= 100
    norm = (torch.randn(in_features) + 1).to(torch.float16).to(device)
    sums = shrink(x, slots, matrices, norm=norm, eps=1e-5)
    check(expand(y.clone(), sums), y, exact_delta(x, slots, matrices, norm, 1e-5), slots)


@pytest.mark.parametrize("rows", [MAX_ROWS, 40, 300])
def test_a_row_does_not_depend_on_the_others(device, rows):
    x, y, slots, matrices = case(device, rows, 200, (37, 8, 11), torch.float32)
    together = expand(y.clone(), shrink(x, slots, matrices))
    for own in (1, 2, 3, 4):
        others_slots, others, others_y = slots.roll(1), torch.randn_like(x) * 100, torch.randn_like(y)
        others_slots[own], others[own], others_y[own] = slots[own], x[own], y[own]
        alone = expand(others_y, shrink(others, others_slots, matrices))
        assert torch.equal(alone[own], together[own])


@pytest.mark.parametrize("rows", [3, 40])
def test_rows_apart_and_other_columns(device, rows):
    x, y, slots, matrices = case(device, rows, 96, (24,), torch.float16)
    wide_x, wide_y = torch.randn(rows, 3, 96).to(x), torch.randn(rows, 60).to(y)
    wide_x[:, 1] = x
    before = wide_y.clone()
    out = expand(wide_y[:, 20:44], shrink(wide_x[:, 1], slots, matrices))
    check(out, before[:, 20:44], exact_delta(x, slots, matrices), slots)
    assert torch.equal(wide_y[:, :20], before[:, :20]) and torch.equal(wide_y[:, 44:], before[:, 44:])


def test_many_slots_in_a_tile(device):
    x, y, slots, matrices = case(device, 300, 64, (24,), torch.float32, ranks=(4, 8) * 10, max_rank=16)
    check(expand(y.clone(), shrink(x, slots, matrices)), y, exact_delta(x, slots, matrices), slots)


def test_references_agree_with_float64(device):
    x, y, slots, matrices = case(device, 9, 64, (37, 8, 11), torch.float32)
    check(expand_reference(y, shrink_reference(x, slots, matrices)), y, exact_delta(x, slots, matrices), slots)


def test_parts_are_wide_and_of_few_numbers():
    for width in (64, 1100, 4096, 12288):
        parts = [num_parts(tokens, width) for tokens in range(17, 9000)]
        assert all(number == 1 or width // number >= 512 for number in parts)
        assert len({(number, tile_rows(tokens)) for tokens, number in enumerate(parts, 17)}) <= 3
    assert num_parts(64, 4096) == 8 and num_parts(512, 4096) == 4 and num_parts(8192, 12288) == 1
