"""Kernels of adapters for products of many rows, against float64."""

import pytest
import torch
import torch.nn.functional as F

from roseinfer.kernels.linear.activation import gated
from roseinfer.kernels.linear.fp8_rows import gated_rows, plain_rows
from roseinfer.kernels.lora.expand_tiles import expand, gated_expanded, gated_rows_expanded
from roseinfer.kernels.lora.shrink_tiles import MAX_SHARED_TILES, shrink_tiles
from tests.helpers.cases import cases, each_value
from tests.helpers.interpreter import round_codes
from tests.helpers.slot_matrices import FEW_RANKS, RANKS, WIDTHS, exact_delta, slot_matrices, slots_of_rows

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FP8_TOLERANCE = 4e-2


@pytest.fixture(autouse=True)
def _rounded_codes():
    round_codes()


@pytest.fixture
def arrived(device):
    counts = torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)
    yield counts
    assert not counts.any(), "the next call would count wrongly"


def case(device, rows, in_features, widths, dtype, **options):
    matrices = slot_matrices(device, in_features, widths, dtype, **options)
    x = torch.randn(rows, in_features).to(dtype).to(device)
    y = torch.randn(rows, sum(widths)).to(dtype).to(device)
    return x, y, slots_of_rows(device, rows, len(matrices.ranks)), matrices


def assert_close(out, expected, tolerance):
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error < tolerance).all(), error  # NaN fails too


def check(out, y, added, slots):
    assert torch.equal(out[slots < 0], y[slots < 0])
    assert_close(out, y.double() + added, TOLERANCE[out.dtype])


@each_value(
    rows=[1, 7, 17, 64, 300],
    widths=WIDTHS,
    in_features=[96, 200, 1100],
    ranks=[RANKS, FEW_RANKS],
    dtype=[torch.float32, torch.float16],
)
def test_outputs(device, arrived, rows, widths, in_features, ranks, dtype):
    x, y, slots, matrices = case(device, rows, in_features, widths, dtype, ranks=ranks, max_rank=max(ranks))
    out = expand(y.clone(), shrink_tiles(x, slots, matrices, arrived))
    check(out, y, exact_delta(x, slots, matrices), slots)


@pytest.mark.parametrize("rows", [40, 300])
def test_ranks_that_need_several_blocks(device, arrived, rows):
    x, y, slots, matrices = case(device, rows, 600, (37, 8, 11), torch.float16, ranks=(100, 8, 0), max_rank=104)
    out = expand(y.clone(), shrink_tiles(x, slots, matrices, arrived))
    check(out, y, exact_delta(x, slots, matrices), slots)


@each_value(rows=[5, 40, 300], grouped=[True, False], ranks=[RANKS, FEW_RANKS])
def test_inputs_in_fp8(device, arrived, rows, grouped, ranks):
    """Rows differ in size, so that a scale of a wrong row shows."""
    x, y, slots, matrices = case(device, rows, 640, (24, 16), torch.float16, ranks=ranks, max_rank=max(ranks))
    codes = plain_rows(x * torch.logspace(-1, 1, rows)[:, None].to(x), grouped=grouped)
    out = expand(y.clone(), shrink_tiles(codes, slots, matrices, arrived))
    check(out, y, exact_delta(codes.widen(), slots, matrices), slots)


@each_value(rows=[5, 40, 300], half=[128, 200], modules=[1, 2, 3], activation=["silu", "gelu_tanh"])
def test_gates(device, arrived, rows, half, modules, activation):
    widths = {1: (2 * half,), 2: (half, half), 3: (half, half - 30, 30)}[modules]
    x, y, slots, matrices = case(device, rows, 96, widths, torch.float16, ranks=FEW_RANKS, max_rank=16)
    out = gated_expanded(y, shrink_tiles(x, slots, matrices, arrived), activation)
    base = slots < 0
    assert torch.equal(out[base], gated(y, activation)[base])
    gate, up = (y.double() + exact_delta(x, slots, matrices)).chunk(2, 1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert_close(out, activated * up, TOLERANCE[torch.float16])


@pytest.mark.parametrize("rows", [5, 40, 300])
def test_gates_in_fp8(device, arrived, rows):
    x, y, slots, matrices = case(device, rows, 96, (256, 256), torch.float16)
    out = gated_rows_expanded(y, shrink_tiles(x, slots, matrices, arrived), "silu")
    base, plain = slots < 0, gated_rows(y, "silu", grouped=True)
    assert torch.equal(out.widen()[base], plain.widen()[base])
    gate, up = (y.double() + exact_delta(x, slots, matrices)).chunk(2, 1)
    assert_close(out.widen(), F.silu(gate) * up, FP8_TOLERANCE)


@cases("rows", [16, 40], exhaustive=[300])
def test_a_row_does_not_depend_on_the_others(device, arrived, rows):
    x, y, slots, matrices = case(device, rows, 600, (37, 8, 11), torch.float32)
    together = expand(y.clone(), shrink_tiles(x, slots, matrices, arrived))
    for own in (1, 3):
        others_slots, others, others_y = slots.roll(1), torch.randn_like(x) * 100, torch.randn_like(y)
        others_slots[own], others[own], others_y[own] = slots[own], x[own], y[own]
        alone = expand(others_y, shrink_tiles(others, others_slots, matrices, arrived))
        assert torch.equal(alone[own], together[own])


@pytest.mark.parametrize("rows", [3, 40])
def test_rows_apart_and_other_columns(device, arrived, rows):
    x, y, slots, matrices = case(device, rows, 96, (24,), torch.float16)
    wide_x, wide_y = torch.randn(rows, 3, 96).to(x), torch.randn(rows, 60).to(y)
    wide_x[:, 1] = x
    before = wide_y.clone()
    out = expand(wide_y[:, 20:44], shrink_tiles(wide_x[:, 1], slots, matrices, arrived))
    check(out, before[:, 20:44], exact_delta(x, slots, matrices), slots)
    assert torch.equal(wide_y[:, :20], before[:, :20]) and torch.equal(wide_y[:, 44:], before[:, 44:])


@pytest.mark.parametrize("rows", [40, 300])
def test_many_slots_in_a_tile(device, arrived, rows):
    x, y, slots, matrices = case(device, rows, 64, (24,), torch.float32, ranks=(4, 8) * 10, max_rank=16)
    check(expand(y.clone(), shrink_tiles(x, slots, matrices, arrived)), y, exact_delta(x, slots, matrices), slots)


def test_no_row_has_an_adapter(device, arrived):
    x, y, slots, matrices = case(device, 300, 64, (24,), torch.float16)
    assert torch.equal(expand(y.clone(), shrink_tiles(x, slots.fill_(-1), matrices, arrived)), y)
