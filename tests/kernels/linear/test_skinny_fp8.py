"""`skinny_linear` by weights in FP8 against float64 on the widened weight, at the tolerance of 16-bit weights."""

import itertools
from itertools import product

import pytest
import torch

from roseinfer.kernels.linear.skinny import (
    MAX_ROWS,
    SkinnyNorm,
    pays,
    skinny_linear,
    skinny_linear_reference,
    supports,
)
from roseinfer.kernels.linear.skinny_fp8_configs import PairsConfig, choose_fp8_config, fp8_rule, slices
from tests.helpers.cases import each_value, pairwise
from tests.helpers.skinny import CONFIGS, KINDS, assert_close, case, dtype_of, exact

SCALES = ["channel", "block"]
both_scales = pytest.mark.parametrize("scales", SCALES)
all_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
NORMS = [None, "rms", "layer"]
# The last one's columns are no multiple of 16, and its outputs no multiple of a tile.
SIZES = {"one row": (1, 256, 8), "some rows": (5, 208, 13), "all rows": (16, 131, 9)}


def fp8_case(device, rows, in_features, out_features, dtype, scales, *, norm=None, gated=False):
    """Return a `case` with a weight in FP8 whose scales differ by up to a hundredfold, so that a wrong one shows."""
    inputs, random = case(device, rows, in_features, out_features, dtype, norm=norm, gated=gated)
    inputs["weight"] = (inputs["weight"].float() * in_features**0.5 * 16).to(torch.float8_e4m3fn)
    weight_rows = inputs["weight"].shape[0]
    shape = (weight_rows,) if scales == "channel" else (-(-weight_rows // 128), -(-in_features // 128))
    inputs["scales"] = torch.logspace(-4, -2, 7)[torch.randint(7, shape)].to(device)
    return inputs, random


def check(inputs, config=None, **options):
    assert_close(skinny_linear(**inputs, config=config, **options), exact(**inputs))


@each_value(config=CONFIGS, kind=KINDS)
def test_every_code_is_widened_exactly(device, config, kind):
    """Rows of x pick single columns of a weight with each finite code in every position of a word."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # 0x7f and 0xff are NaN
    weight = torch.stack([codes.roll(shift) for shift in range(64)], 1).contiguous().view(torch.float8_e4m3fn)
    dtype = dtype_of(kind, config)
    x = torch.zeros(4, 64, dtype=dtype)
    picked = [0, 17, 42, 63]
    x[range(4), picked] = 1
    scales = torch.ones(len(codes), device=device)
    out = skinny_linear(x.to(device), weight.to(device), scales=scales, config=config)
    assert torch.equal(out.cpu(), weight.to(dtype)[:, picked].T)


@pairwise(config=CONFIGS, norm=NORMS, size=SIZES, kind=KINDS, scales=SCALES)
def test_products_of_ragged_shapes(device, config, kind, scales, norm, size):
    rows, in_features, out_features = size
    check(fp8_case(device, rows, in_features, out_features, dtype_of(kind, config), scales, norm=norm)[0], config)


@each_value(config=CONFIGS, scales=SCALES)
def test_scales_of_several_rows_of_blocks(device, config, scales):
    check(fp8_case(device, 2, 144, 133, torch.float16, scales)[0], config)


@pairwise(config=CONFIGS, kind=KINDS, scales=SCALES)
def test_bias_activation_and_residual(device, config, kind, scales):
    """A bias and an activation show whether the scale comes before them."""
    inputs, random = fp8_case(device, 3, 256, 21, dtype_of(kind, config), scales, norm="layer")
    inputs |= {"bias": random(21), "residual": random(3, 21), "activation": "gelu_tanh"}
    check(inputs, config)


@each_value(config=CONFIGS, kind=KINDS, scales=SCALES)
def test_gated(device, config, kind, scales):
    out_features = 19 if scales == "channel" else 128
    inputs, random = fp8_case(device, 2, 144, out_features, dtype_of(kind, config), scales, norm="rms", gated=True)
    check(inputs | {"gated": True, "activation": "silu", "bias": random(2 * out_features)}, config)


@each_value(rows=range(1, MAX_ROWS + 1), scales=SCALES)
def test_every_number_of_rows_with_the_chosen_config(device, rows, scales):
    inputs, random = fp8_case(device, rows, 192, 40, torch.float16, scales, norm="rms")
    inputs["residual"] = random(rows, 40)
    check(inputs)


@all_configs
def test_strided_inputs_and_the_residual_in_place(device, config):
    inputs, random = fp8_case(device, 4, 256, 24, torch.float16, "block", norm="rms")
    wide_x, wide_residual = random(4, 3, 256), random(4, 48)
    wide_x[:, 1] = inputs["x"]
    inputs |= {"x": wide_x[:, 1], "residual": wide_residual[:, 16:40]}
    expected, before = exact(**inputs), wide_residual.clone()
    skinny_linear(**inputs, out=inputs["residual"], config=config)
    assert_close(wide_residual[:, 16:40], expected)
    assert torch.equal(wide_residual[:, :16], before[:, :16]) and torch.equal(wide_residual[:, 40:], before[:, 40:])


@each_value(config=CONFIGS, scales=SCALES)
def test_a_row_does_not_depend_on_the_others(device, config, scales):
    inputs, _ = fp8_case(device, 8, 192, 24, dtype_of("bfloat16", config), scales, norm="rms")
    together = skinny_linear(**inputs, config=config)
    x = inputs["x"]
    inputs["x"] = torch.randn_like(x) * 100
    inputs["x"][5] = x[5]
    assert torch.equal(skinny_linear(**inputs, config=config)[5], together[5])


def test_a_large_residual_stream_in_float16(device):
    """x times the norm's weight exceeds float16's range, the normed x does not."""
    inputs, _ = fp8_case(device, 2, 128, 16, torch.float16, "channel", norm="rms")
    inputs["x"] = inputs["x"] * 4000
    inputs["norm"].weight.mul_(10)
    check(inputs)


@both_scales
def test_reference_agrees_with_float64(device, scales):
    inputs, random = fp8_case(device, 3, 192, 136, torch.float32, scales, norm="layer")
    inputs |= {"activation": "gelu_tanh", "bias": random(136), "residual": random(3, 136)}
    assert_close(skinny_linear_reference(**inputs), exact(**inputs))


def test_supports(device):
    weight = torch.zeros(256, 64, dtype=torch.float8_e4m3fn)
    channel, block = torch.ones(256), torch.ones(2, 1)
    assert supports(1, weight, False, channel) and supports(MAX_ROWS, weight, True, block)
    assert not supports(MAX_ROWS + 1, weight, False, channel)
    assert not supports(1, weight)  # codes without scales
    assert not supports(1, weight, False, channel.double())
    assert not supports(1, weight.to(torch.bfloat16), False, channel)
    assert not supports(1, weight.view(torch.uint8).view(torch.float8_e5m2), False, channel)
    uneven = torch.zeros(320, 64, dtype=torch.float8_e4m3fn)  # the up projection begins in the middle of a block
    assert supports(1, uneven, False, torch.ones(3, 1)) and not supports(1, uneven, True, torch.ones(3, 1))
    assert pays(1, weight, False, channel) and not pays(1, uneven, True, torch.ones(3, 1))


REAL_SHAPES = [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 4096), (4096, 12288), (5120, 17408), (14336, 5120)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_chosen_configs_can_run(gated, blocks):
    weights = [*REAL_SHAPES, (6144, 1024), (24576, 4096), (6, 5)]
    for bucket, (weight_rows, columns) in product((1, 2, 4, 8, 16), weights):
        shape = (bucket, weight_rows, columns, gated)
        config = choose_fp8_config(*shape, blocks=blocks) or fp8_rule(*shape)
        for value in (config.block_n, config.block_k, config.warps):
            assert value & (value - 1) == 0, shape
        assert config.block_n <= 128, shape  # rows of one block of scales
        assert config.block_k >= 16 * config.warps, shape
        if isinstance(config, PairsConfig):
            assert config.block_k % 128 == 0 and columns % (128 if blocks else 16) == 0, shape
        if getattr(config, "dot", False):
            width = config.block_k // slices(config, blocks=blocks)
            assert width >= 16 and (not blocks or 128 % width == 0), shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("out_features", "in_features"), REAL_SHAPES)
@both_scales
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_real_shapes(device, rows, in_features, out_features, scales):
    inputs, random = fp8_case(device, rows, in_features, out_features, torch.bfloat16, scales, norm="rms")
    inputs["residual"] = random(rows, out_features)
    check(inputs, overlap=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@both_scales
def test_overlapping_kernels_wait_for_each_other(device, scales):
    """A long chain through one residual buffer gives the same bits as kernels one after another."""
    layers = [fp8_case(device, 4, 1024, 1024, torch.bfloat16, scales)[0] for _ in range(16)]
    norm = SkinnyNorm(torch.rand(1024, device=device).to(torch.bfloat16) + 1, 1e-5)

    def chain(overlap):
        stream, hidden = layers[0]["x"].clone(), torch.empty_like(layers[0]["x"])
        for up, down in itertools.pairwise(layers):
            options = {"scales": up["scales"], "norm": norm, "activation": "silu"}
            skinny_linear(stream, up["weight"], out=hidden, overlap=overlap, **options)
            skinny_linear(hidden, down["weight"], scales=down["scales"], residual=stream, out=stream, overlap=overlap)
        return stream

    expected = chain(False)
    for _ in range(20):
        assert torch.equal(chain(True), expected)
