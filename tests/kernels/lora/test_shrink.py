"""Sums of few rows, against float64."""

import pytest
import torch

from roseinfer.kernels.lora.expand import expand_reference
from roseinfer.kernels.lora.shrink import MAX_ROWS, shrink, shrink_reference
from tests.helpers.slot_matrices import exact_delta, slot_matrices, slots_of_rows

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def case(device, rows, in_features, widths, dtype):
    matrices = slot_matrices(device, in_features, widths, dtype)
    x = torch.randn(rows, in_features).to(dtype).to(device)
    y = torch.randn(rows, sum(widths)).to(dtype).to(device)
    return x, y, slots_of_rows(device, rows, len(matrices.ranks)), matrices


def check(out, y, added, slots):
    assert torch.equal(out[slots < 0], y[slots < 0].float())
    expected = y.double() + added
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error < TOLERANCE[y.dtype]).all(), error  # NaN fails too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [5, MAX_ROWS])
def test_sums(device, rows, dtype):
    x, _, slots, matrices = case(device, rows, 128, (24,), dtype)
    sums, expected = shrink(x, slots, matrices), shrink_reference(x, slots, matrices)
    for row, slot in enumerate(slots.tolist()):
        rank = int(matrices.ranks[slot]) if slot >= 0 else 0
        torch.testing.assert_close(sums.values[0, row, :rank], expected.values[0, row, :rank])


@pytest.mark.parametrize("in_features", [64, 4100])
def test_norm_before(device, in_features):
    """One row is large, so that a norm of a wrong row shows."""
    x, y, slots, matrices = case(device, 7, in_features, (24,), torch.float16)
    x[3] *= 100
    norm = (torch.randn(in_features) + 1).to(torch.float16).to(device)
    sums = shrink(x, slots, matrices, norm=norm, eps=1e-5)
    for row, slot in enumerate(slots.tolist()):  # the reference adds all places
        for module in range(matrices.modules if slot >= 0 else 0):
            start = module * matrices.max_rank
            sums.values[0, row, start + int(matrices.ranks[slot]) : start + matrices.max_rank] = 0
    check(expand_reference(y, sums), y, exact_delta(x, slots, matrices, norm, 1e-5), slots)


def test_a_row_does_not_depend_on_the_others(device):
    x, _, slots, matrices = case(device, MAX_ROWS, 200, (37, 8, 11), torch.float32)
    together = shrink(x, slots, matrices).values[0]
    for own in (1, 2, 3, 4):
        others_slots, others = slots.roll(1), torch.randn_like(x) * 100
        others_slots[own], others[own] = slots[own], x[own]
        alone, rank = shrink(others, others_slots, matrices).values[0], int(matrices.ranks[slots[own]])
        for module in range(matrices.modules):
            start = module * matrices.max_rank
            assert torch.equal(alone[own, start : start + rank], together[own, start : start + rank])


def test_references_agree_with_float64(device):
    x, y, slots, matrices = case(device, 9, 64, (37, 8, 11), torch.float32)
    check(expand_reference(y, shrink_reference(x, slots, matrices)), y, exact_delta(x, slots, matrices), slots)
