"""Experts' products in tiles against float64 on the widened factors: both ways round, gathered and spread."""

import pytest
import torch
import torch.nn.functional as F

from roseinfer.kernels.common.clamped_swish import clamped_swish
from roseinfer.kernels.common.mxfp4_codes import round_mxfp4, widen_mxfp4
from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.experts.mxfp4_weights import MAX_WIDENED_SCALE, SUMS_FACTOR, widened
from roseinfer.kernels.experts.pair_order import order_pairs
from roseinfer.kernels.experts.tile_configs import ExpertsConfig, ProductConfig, choose_experts_config
from roseinfer.kernels.experts.tiles import Stack, add_experts, down_product, gate_up_product, spread
from roseinfer.kernels.linear.fp8_rows import Fp8Rows, rows_reference
from roseinfer.quant.int4_experts import expert_codes
from roseinfer.quant.int4_weight import Int4Weight
from roseinfer.quant.nvfp4_weight import Nvfp4Weight
from tests.helpers.cases import cases, each_value
from tests.helpers.expert_layers import stack_in_nvfp4
from tests.helpers.interpreter import round_codes

WIDE = ProductConfig(64, 64, 4, 3)
CODES = ProductConfig(128, 128, 4, 3)
EXPERTS, TOP_K = 5, 2


def config(cut, tile, weight_first, spreads):
    return ExpertsConfig(tile, weight_first, spreads, cut, cut)


KINDS = [(16, True, False), (32, True, True), (64, False, False), (64, False, True), (128, False, False)]
IDS = ["weight first", "weight first, spread", "rows first", "rows first, spread", "rows first, halves"]


@pytest.fixture(params=KINDS, ids=IDS)
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def _hopper_or_a_cpu_that_rounds_alike():
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the tensor memory accelerator needs compute capability 9.0")
    round_codes()


def stack(outs, columns, device, scaled_by="none"):
    """Return a matrix of each expert, and its values in float64."""
    shape = (EXPERTS, outs, columns)
    if scaled_by == "none":
        weights = (torch.randn(shape, device=device) / columns**0.5).half()
        return Stack(weights), weights.double()
    if scaled_by == "mxfp4":
        codes, scales = round_mxfp4(torch.randn(shape, device=device) / columns**0.5)
        return Stack(codes, scales), widen_mxfp4(codes, scales, torch.float64)
    if scaled_by.startswith("int4"):
        weight = Int4Weight.of(torch.randn(EXPERTS * outs, columns, device=device) / columns**0.5, int(scaled_by[5:]))
        codes, scales = (part.view(EXPERTS, outs, -1) for part in expert_codes(weight))
        return Stack(codes, scales), weight.widen(torch.float64).view(shape)
    if scaled_by == "nvfp4":
        sizes = torch.tensor([1.0, 2.0, 0.7, 1.0, 0.5], device=device)
        matrices = torch.randn(shape, device=device) / columns**0.5 * sizes[:, None, None]
        return stack_in_nvfp4(matrices), torch.stack([Nvfp4Weight.of(one).widen(torch.float64) for one in matrices])
    codes = (torch.randn(shape, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = (EXPERTS, outs // 128, columns // 128)
    scales = (0.5 + torch.rand(blocks if scaled_by == "block" else shape[:2], device=device)) / 100 / columns**0.5
    if scaled_by == "block":
        spread_scales = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    else:
        spread_scales = scales[:, :, None]
    return Stack(codes, scales), codes.double() * spread_scales


def choice(tokens, device):
    """Choose experts: the second one gets most tokens, the last one none."""
    ids = torch.tensor([[1, 0], [3, 1], [1, 2]], dtype=torch.int32).repeat(-(-tokens // 3), 1)[:tokens].contiguous()
    return ids.to(device), torch.rand(tokens, TOP_K, device=device)


def hidden_layer(x, gate_up, ids):
    """Return the hidden layer [T, k, I] in float64."""
    gate, up = torch.einsum("th,teoh->teo", x, gate_up[ids.long()]).chunk(2, -1)
    return F.silu(gate) * up


def assert_close(found, expected, most=2e-3):
    error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert found.shape == expected.shape and (error < most).all(), error  # NaN fails too


def run(x, gate_up, down, ids, weights, config, residual=None, activation="silu"):
    order = order_pairs(ids, EXPERTS, config.tile)
    rows = spread(x, order, TOP_K) if config.spread else x
    h = gate_up_product(rows, gate_up, order, TOP_K, activation, config)
    parts = down_product(h, down, order, weights, config, x.dtype if isinstance(x, torch.Tensor) else torch.float16)
    return order, h, parts, add_experts(parts, TOP_K, residual)


# Neither width is a multiple of a program's block, and there are more tokens than rows of a tile.
def test_experts_in_16_bits(kind, device):
    gate_up, exact_gate_up = stack(2 * 72, 200, device)
    down, exact_down = stack(200, 72, device)
    ids, weights = choice(70, device)
    wide = torch.randn(70, 264, device=device).half()
    x, residual = wide[:, :200], torch.randn(70, 264, device=device).half()
    beside, before = residual[:, 200:].clone(), residual[:, :200].double()
    order, h, parts, out = run(x, gate_up, down, ids, weights, config(WIDE, *kind), residual[:, :200])
    exact = hidden_layer(x.double(), exact_gate_up, ids)
    assert_close(h, exact.flatten(0, 1)[order.pairs.long()])
    of_each = torch.einsum("tki,tkhi->tkh", exact, exact_down[ids.long()]) * weights.double()[:, :, None]
    assert_close(parts, of_each.flatten(0, 1))
    assert_close(out, before + of_each.sum(1))
    assert torch.equal(residual[:, 200:], beside) and out.data_ptr() == residual.data_ptr()


@pytest.mark.parametrize(
    ("scaled_by", "kind"),
    [("block", KINDS[1]), ("block", KINDS[2]), ("block", KINDS[4]), ("channel", KINDS[0]), ("channel", KINDS[3])],
    ids=["block, weight first, spread", "block, rows first", "block, halves", "channel", "channel, rows first, spread"],
)
def test_experts_in_codes(scaled_by, kind, device):
    gate_up, exact_gate_up = stack(2 * 128, 256, device, scaled_by)
    down, exact_down = stack(256, 128, device, scaled_by)
    ids, weights = choice(37, device)
    x = rows_reference(torch.randn(37, 256, device=device), grouped=True)
    order, h, parts, out = run(x, gate_up, down, ids, weights, config(CODES, *kind))
    exact = hidden_layer(x.widen().double(), exact_gate_up, ids)
    assert isinstance(h, Fp8Rows)
    assert_close(h.widen(), exact.flatten(0, 1)[order.pairs.long()], 4e-2)  # half a step of codes is 1 / 17 at most
    seen = torch.empty_like(exact.flatten(0, 1))
    seen[order.pairs.long()] = h.widen().double()
    of_each = torch.einsum("tki,tkhi->tkh", seen.view(37, TOP_K, 128), exact_down[ids.long()]) * weights[:, :, None]
    assert_close(parts, of_each.flatten(0, 1))
    assert_close(out, of_each.sum(1))


# The hidden layer is an odd number of blocks of 32, as in gpt-oss.
@cases("kind", [KINDS[0], KINDS[4]], exhaustive=KINDS[1:4])
def test_mxfp4_with_biases(kind, device):
    gate_up, exact_gate_up = stack(2 * 96, 160, device, "mxfp4")
    down, exact_down = stack(160, 96, device, "mxfp4")
    biases = [torch.randn(EXPERTS, outs, device=device).half() for outs in (2 * 96, 160)]
    gate_up, down = gate_up._replace(bias=biases[0]), down._replace(bias=biases[1])
    ids, weights = choice(70, device)
    x = torch.randn(70, 160, device=device).half()
    cut = ProductConfig(64, 64, 4, 3)
    order, h, parts, out = run(x, gate_up, down, ids, weights, config(cut, *kind), activation="clamped_swish")
    gate, up = (
        torch.einsum("th,tkoh->tko", x.double(), exact_gate_up[ids.long()]) + biases[0].double()[ids.long()]
    ).chunk(2, -1)
    exact = clamped_swish(gate, up)
    assert_close(h, exact.flatten(0, 1)[order.pairs.long()], 5e-3)
    seen = torch.empty_like(exact.flatten(0, 1))
    seen[order.pairs.long()] = h.double()
    of_each = torch.einsum("tki,tkhi->tkh", seen.view(70, TOP_K, 96), exact_down[ids.long()])
    of_each = (of_each + biases[1].double()[ids.long()]) * weights[:, :, None]
    assert_close(parts, of_each.flatten(0, 1), 5e-3)
    assert_close(out, of_each.sum(1), 1e-2)


@cases(
    ("kind", "group"),
    [(KINDS[1], 128), (KINDS[4], 32)],
    exhaustive=[(KINDS[0], 32), (KINDS[2], 64), (KINDS[3], 256)],
)
def test_int4(kind, group, device):
    """Outputs and columns end within a program's block, and the down product may have 16 bits."""
    down = "none" if kind == KINDS[1] else "int4 32" if group == 32 else "int4 96"
    check_four_bits(kind, f"int4 {group}", down, device)


@cases("kind", [KINDS[1], KINDS[4]], exhaustive=[KINDS[0], KINDS[2], KINDS[3]])
def test_nvfp4(kind, device):
    check_four_bits(kind, "nvfp4", "nvfp4", device)


def check_four_bits(kind, up_kind, down_kind, device):
    gate_up, exact_gate_up = stack(2 * 96, 256, device, up_kind)
    down, exact_down = stack(200, 96, device, down_kind)
    ids, weights = choice(70, device)
    x = torch.randn(70, 256, device=device).half()
    order, h, parts, _ = run(x, gate_up, down, ids, weights, config(WIDE, *kind))
    exact = hidden_layer(x.double(), exact_gate_up, ids)
    assert_close(h, exact.flatten(0, 1)[order.pairs.long()], 4e-3)
    of_each = torch.einsum("tki,tkhi->tkh", exact, exact_down[ids.long()]) * weights.double()[:, :, None]
    assert_close(parts, of_each.flatten(0, 1), 5e-3)


@triton.jit
def _widening_kernel(codes, scales, out, N: tl.constexpr, K: tl.constexpr, COMPILED: tl.constexpr):
    n = tl.arange(0, N)[:, None]
    found = tl.load(codes + n * (K // 8) + tl.arange(0, K // 8)[None, :])
    of_blocks = tl.load(scales + n * (K // 32) + tl.arange(0, K // 32)[None, :])
    tl.store(out + n * K + tl.arange(0, K)[None, :], widened(found, of_blocks, out.dtype.element_ty, COMPILED))


@pytest.mark.filterwarnings("ignore:overflow")
def test_every_byte_of_mxfp4_with_every_scale_is_exact(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(256, 1)
    scales = torch.arange(256, device=device).clamp(max=MAX_WIDENED_SCALE).byte()[:, None].repeat(1, 16)
    out = torch.empty(256, 512, dtype=torch.bfloat16, device=device)
    for first in range(0, 256, 16):
        part = slice(first, first + 16)
        _widening_kernel[(1,)](codes[part].view(torch.int32), scales[part], out[part], 16, 512, device.type == "cuda")
    expected = widen_mxfp4(codes, scales, torch.float32)
    if device.type == "cuda":
        expected = expected / SUMS_FACTOR.value
    else:  # the interpreter rounds bfloat16's subnormal numbers to 0
        is_normal = expected.abs() >= 2.0**-126
        out, expected = out[is_normal], expected[is_normal]
    assert torch.equal(out, expected.bfloat16())


def test_tiles_that_are_half_empty_at_least_and_others(device):
    """An expert has 130 rows: a whole tile and two rows of the next one; the others have some 40."""
    (gate_up, exact_gate_up), (down, exact_down) = stack(2 * 64, 64, device), stack(64, 64, device)
    ids, weights = choice(130, device)
    x = (torch.randn(130, 64, device=device) / 4).half()
    _, _, parts, _ = run(x, gate_up, down, ids, weights, config(WIDE, *KINDS[4]))
    hidden = hidden_layer(x.double(), exact_gate_up, ids)
    expected = torch.einsum("tki,tkhi->tkh", hidden, exact_down[ids.long()]) * weights.double()[:, :, None]
    assert_close(parts, expected.flatten(0, 1), most=4e-3)


@each_value(kind=dict(zip([IDS[0], *IDS[3:]], [KINDS[0], *KINDS[3:]], strict=True)), codes=[False, True])
def test_a_row_does_not_depend_on_the_others(codes, kind, device):
    scaled_by = "block" if codes else "none"
    gate_up, down = stack(2 * 128, 128, device, scaled_by)[0], stack(128, 128, device, scaled_by)[0]
    ids, weights = choice(20, device)
    x = torch.randn(20, 128, device=device).half()

    def of(tokens):
        rows = rows_reference(x[tokens].contiguous(), grouped=True) if codes else x[tokens]
        return run(rows, gate_up, down, ids[tokens], weights[tokens], config(CODES, *kind))[-1]

    together = of(slice(0, 20))
    # The interpreter multiplies by numpy, whose last bit depends on a row's place in the matrix.
    most = 0.0 if device.type == "cuda" else 1e-3
    for tokens in (slice(0, 3), slice(13, 20)):
        torch.testing.assert_close(of(tokens), together[tokens], rtol=most, atol=most)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(("experts", "top_k", "width"), [(128, 8, 768), (8, 2, 14336)])
def test_every_number_of_tokens_has_a_config(experts, top_k, width, codes):
    numbers = (1, 16, 64, 256, 1024, 16384)
    chosen = [choose_experts_config(tokens, top_k, experts, width, codes=codes) for tokens in numbers]
    tiles = [config.tile for config in chosen]
    assert tiles == sorted(tiles) and tiles[0] == 16 and tiles[-1] >= 64
    for config in chosen:
        assert config.tile >= (16 if config.weight_first else 64)
        for cut in (config.gate_up, config.down):
            assert cut.block_n >= 64 and (not codes or cut.block_k == 128)
        assert not codes or config.gate_up.block_n == 128, "it is written in groups of 128"
