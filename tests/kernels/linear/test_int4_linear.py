"""`int4_linear` against float64: a row or two in pairs, which the interpreter multiplies one by one, and more rows on
matrix units, which need a GPU.
"""

import pytest
import torch

from roseinfer.kernels.linear.int4_codes import pack
from roseinfer.kernels.linear.int4_linear import int4_linear, pays
from roseinfer.kernels.linear.skinny import SkinnyNorm
from roseinfer.kernels.linear.skinny_fp8_configs import PairsConfig
from roseinfer.kernels.linear.skinny_int4_configs import NVFP4_TABLE, TABLE, choose_int4_config, direct_rule
from roseinfer.kernels.lora.slots import SlotRows
from roseinfer.quant.int4_matmul import packed
from roseinfer.quant.nvfp4_weight import Nvfp4Weight
from tests.helpers.cases import pairwise
from tests.helpers.int4 import NVFP4, four_bits_case
from tests.helpers.skinny import assert_close, exact
from tests.helpers.slot_matrices import FEW_RANKS, exact_delta, slot_matrices, slots_of_rows

PAIRS = {
    "programs that stay": PairsConfig(block_n=4, block_k=128, warps=2, stages=2, programs=3),
    "a program a tile": PairsConfig(block_n=8, block_k=256, warps=1, stages=1, programs=0),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Gluon kernels need a GPU")
# Groups of a whole row have no power of two columns here.
WIDTHS = {NVFP4: 336, 32: 416, 64: 320, 128: 384, 416: 416}


def draw(device, *shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype).to(device)


def check(x, weight, wide, config=None, **options):
    assert_close(int4_linear(x, weight, config=config, **options), exact(x, wide, **options))


@pytest.mark.parametrize("config", PAIRS.values(), ids=PAIRS)
def test_every_code_at_every_place(device, config):
    """Rows of x pick single columns of a weight with each code in every column."""
    codes = torch.arange(16, dtype=torch.uint8)
    codes = torch.stack([codes.roll(shift) for shift in range(256)], 1)
    ones = torch.ones(16, 2, dtype=torch.float16, device=device)
    weight = pack((codes[:, ::2] | codes[:, 1::2] << 4).to(device), ones, 0 * ones)
    for picked in ([0, 17], [142, 255], [8, 69]):
        x = torch.zeros(2, 256, dtype=torch.float16)
        x[range(2), picked] = 1
        out = int4_linear(x.to(device), weight, config=config)
        assert torch.equal(out.cpu(), codes[:, picked].T.half() - 8)


@pytest.mark.parametrize("config", PAIRS.values(), ids=PAIRS)
def test_every_code_of_nvfp4_with_every_scale(device, config):
    """A row of x picks one column, and each other row of the weight has it in another scale."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(16)
    codes = torch.stack([codes.roll(shift) for shift in range(127)])
    scales = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 16).view(torch.float8_e4m3fn)
    given = Nvfp4Weight(codes[:, ::2] | codes[:, 1::2] << 4, scales, torch.full((127,), 2.0**-8))
    weight = packed(Nvfp4Weight(*(part.to(device) for part in (given.codes, given.scales, given.factors))))
    wide = given.widen(torch.float32)
    for picked in ([0, 17], [142, 255], [8, 69]):
        x = torch.zeros(2, 256, dtype=torch.float16)
        x[range(2), picked] = 1
        out = int4_linear(x.to(device), weight, config=config)
        assert torch.equal(out.cpu(), wide[:, picked].T.half())


@pairwise(group=[NVFP4, 32, 64, 128, 416], symmetric=[False, True], norm=[None, "rms"], rows=[1, 2], config=PAIRS)
def test_a_row_or_two(device, group, symmetric, norm, rows, config):
    weight, wide = four_bits_case(device, 13, WIDTHS[group], group, symmetric=symmetric)
    x = draw(device, rows, WIDTHS[group])
    options = {"norm": SkinnyNorm(draw(device, WIDTHS[group]) + 1, 1e-5)} if norm else {}
    check(x, weight, wide, config, **options)


@pytest.mark.parametrize("group", [NVFP4, 32])
def test_columns_of_very_different_size(device, group):
    """Each unit has a scale of its own; a large one does not push the others out of float16."""
    weight, wide = four_bits_case(device, 8, 512, group)
    x = draw(device, 2, 512)
    x *= torch.logspace(-6, 6, 32, device=device).repeat_interleave(16).to(torch.bfloat16)
    x[1, 5] = 60000
    check(x, weight, wide, PAIRS["programs that stay"])


@pytest.mark.parametrize("group", [NVFP4, 64])
@pytest.mark.parametrize("config", PAIRS.values(), ids=PAIRS)
def test_gate_bias_and_the_residual_in_place(device, config, group):
    weight, wide = four_bits_case(device, 38, 256, group)
    x, bias = draw(device, 2, 256, dtype=torch.float16), draw(device, 38, dtype=torch.float16)
    check(x, weight, wide, config, gated=True, activation="silu", bias=bias)
    residual = draw(device, 2, 48, dtype=torch.float16)
    options = {"bias": bias, "residual": residual[:, 8:46]}
    expected, before = exact(x, wide, **options), residual.clone()
    int4_linear(x, weight, config=config, **options, out=options["residual"])
    assert_close(residual[:, 8:46], expected)
    assert torch.equal(residual[:, :8], before[:, :8]) and torch.equal(residual[:, 46:], before[:, 46:])


@pytest.mark.parametrize("rows", [1, 2, pytest.param(7, marks=needs_gpu)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group", [NVFP4, 64])
def test_what_adapters_add(device, rows, gated, group):
    weight, wide = four_bits_case(device, 40, 256, group)
    matrices = slot_matrices(device, 256, (20, 20), torch.bfloat16, FEW_RANKS, 16)
    x, slots = draw(device, rows, 256), slots_of_rows(device, rows, len(matrices.ranks))
    options = {"gated": True, "activation": "silu"} if gated else {}
    out = int4_linear(x, weight, delta=SlotRows(slots, matrices), **options)
    base = (slots < 0) | (matrices.ranks[slots.clamp_min(0)] == 0)
    assert torch.equal(out[base], int4_linear(x, weight, **options)[base])
    added = exact_delta(x, slots, matrices)
    assert_close(out, torch.cat([exact(x[i : i + 1], wide, bias=added[i], **options) for i in range(rows)]))


def test_a_row_does_not_depend_on_the_other(device):
    weight, _ = four_bits_case(device, 12, 256, 128)
    x = draw(device, 2, 256)
    together = int4_linear(x, weight, config=PAIRS["programs that stay"])
    other = int4_linear(torch.stack((x[0] * 100, x[1])), weight, config=PAIRS["programs that stay"])
    assert torch.equal(other[1], together[1])


@needs_gpu
@pairwise(
    group=[NVFP4, 32, 64, 128, 0],
    symmetric=[False, True],
    size={"few": (3, 3584, 48), "seven": (7, 960, 33), "all": (16, 4736, 64)},
    norm=[None, "rms", "layer"],
    gated=[False, True],
    overlap=[False, True],
    kind=["bfloat16", "float16"],
)
def test_more_rows(device, group, symmetric, size, norm, gated, overlap, kind):
    (rows, columns, outs), dtype = size, getattr(torch, kind)
    if columns % (group or columns):
        group = 64
    weight, wide = four_bits_case(device, 2 * outs if gated else outs, columns, group or columns, symmetric=symmetric)
    x = draw(device, rows, columns, dtype=dtype) * (1 + torch.arange(rows, device=device, dtype=dtype))[:, None]
    options = {"bias": draw(device, len(weight.codes), dtype=dtype)}
    if norm:
        shift = draw(device, columns, dtype=dtype) if norm == "layer" else None
        options["norm"] = SkinnyNorm(draw(device, columns, dtype=dtype) + 1, 1e-5, shift)
    options |= {"gated": True, "activation": "silu"} if gated else {"residual": draw(device, rows, outs, dtype=dtype)}
    expected = exact(x, wide, **options)
    error = (int4_linear(x, weight, **options, overlap=overlap).double() - expected).norm() / expected.norm()
    assert error < {"bfloat16": 8e-3, "float16": 2e-3}[kind], error


@needs_gpu
def test_a_row_of_many_does_not_depend_on_the_others(device):
    weight, _ = four_bits_case(device, 64, 1024, 128)
    x = draw(device, 8, 1024)
    together = int4_linear(x, weight)
    other = draw(device, 8, 1024) * 100
    other[5] = x[5]
    assert torch.equal(int4_linear(other, weight)[5], together[5])


@pytest.mark.parametrize("columns", [128, 960 + 64, 3584, 4096, 12288, 18944])
def test_configs_fit_the_kernels(columns):
    for weight_rows, gated in ((64, False), (4096, False), (24576, True)):
        config = direct_rule(weight_rows, columns, gated)
        assert columns % config.block_k == 0 and config.block_k % (128 * config.warps) == 0
        assert (2 if gated else 1) * config.block_n % 16 == 0
        assert isinstance(choose_int4_config(1, weight_rows, columns, gated), PairsConfig)
        assert choose_int4_config(4, weight_rows, columns, gated, direct=False) is None
        assert isinstance(choose_int4_config(2, weight_rows, columns, gated, direct=False), PairsConfig)
    for (_, _, width, _), config in (*TABLE.entries.items(), *NVFP4_TABLE.entries.items()):
        assert isinstance(config, PairsConfig) or config is None or width % config.block_k == 0


def test_pays_up_to_sixteen_rows():
    weight, _ = four_bits_case("cpu", 64, 256, 128)
    assert pays(1, weight, False) and not pays(17, weight, False)
