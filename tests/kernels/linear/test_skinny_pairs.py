"""A row or two by FP8 in pairs of float16, against float64; the interpreter multiplies without the pairs."""

from dataclasses import replace

import pytest
import torch

from roseinfer.kernels.linear.skinny import skinny_linear
from roseinfer.kernels.linear.skinny_fp8_configs import PairsConfig
from roseinfer.kernels.linear.small_product import SmallProduct
from tests.helpers.cases import pairwise
from tests.helpers.skinny import assert_close, exact, exact_norm
from tests.kernels.linear.test_skinny_fp8 import fp8_case

CONFIGS = {
    "programs that stay": PairsConfig(block_n=4, block_k=128, warps=2, stages=2, programs=3),
    "a program a tile": PairsConfig(block_n=8, block_k=256, warps=1, stages=1, programs=0),
    "columns that end within a block": PairsConfig(block_n=4, block_k=1024, warps=2, stages=1, programs=0),
}
SMALL = CONFIGS["programs that stay"]
both_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
both_scales = pytest.mark.parametrize("scales", ["channel", "block"])


def check(inputs, config):
    assert_close(skinny_linear(**inputs, config=config), exact(**inputs))


@both_configs
def test_every_code_is_widened_exactly(device, config):
    """Rows of x pick single columns of a weight with each finite code in every position of a word."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # 0x7f and 0xff are NaN
    weight = torch.stack([codes.roll(shift) for shift in range(256)], 1).contiguous().view(torch.float8_e4m3fn)
    for picked in ([0, 17], [142, 255]):
        x = torch.zeros(2, 256, dtype=torch.float16)
        x[range(2), picked] = 1
        out = skinny_linear(x.to(device), weight.to(device), scales=torch.ones(254, device=device), config=config)
        assert torch.equal(out.cpu(), weight.half()[:, picked].T)


@pairwise(norm=[None, "rms", "layer"], size=[(1, 13), (2, 8), (3, 133)], config=CONFIGS, scales=["channel", "block"])
def test_products(device, config, scales, norm, size):
    rows, out_features = size
    # A LayerNorm takes another kernel, whose matrix products the interpreter has in float16.
    dtype = torch.float16 if norm == "layer" else torch.bfloat16
    check(fp8_case(device, rows, 512, out_features, dtype, scales, norm=norm)[0], config)


@both_configs
def test_a_norm_in_float32(device, config):
    """Weights of norms with an offset are kept in it."""
    inputs, _ = fp8_case(device, 1, 512, 24, torch.bfloat16, "block", norm="rms")
    inputs["norm"] = replace(inputs["norm"], weight=inputs["norm"].weight.float() + 1e-3)
    check(inputs, config)


@pairwise(norm=[None, "rms"], size=[(1, 512, 13), (2, 512, 5), (1, 2304, 3)], config=CONFIGS)
def test_a_small_product_of_the_same_input(device, config, norm, size):
    """The launch's own product keeps its bits; 2,304 columns end within the small product's last block."""
    rows, columns, small_rows = size
    inputs, random = fp8_case(device, rows, columns, 40, torch.bfloat16, "block", norm=norm)
    small = SmallProduct(random(small_rows, columns), torch.empty(rows, small_rows, dtype=torch.bfloat16).to(device))
    alone = skinny_linear(**inputs, config=config)
    assert torch.equal(skinny_linear(**inputs, config=config, small=small), alone)
    expected = exact_norm(inputs["x"], inputs.get("norm")) @ small.weight.double().T
    assert_close(small.out, expected)


@both_scales
def test_columns_of_very_different_size(device, scales):
    """Each sixteen of them have a scale of their own; a large one does not push the others out of float16."""
    inputs, _ = fp8_case(device, 2, 512, 24, torch.bfloat16, scales, norm="rms")
    inputs["x"] *= torch.logspace(-6, 6, 32, device=device).repeat_interleave(16).to(torch.bfloat16)
    check(inputs, SMALL)
    inputs["x"][:, 5] = 60000
    check(inputs, SMALL)


def test_the_largest_codes_and_zeros(device):
    weight = torch.full((8, 256), 448.0, device=device).to(torch.float8_e4m3fn)
    x = torch.full((2, 256), 3.0, dtype=torch.bfloat16, device=device)
    x[1] = 0
    out = skinny_linear(x, weight, scales=torch.ones(8, device=device), config=SMALL, out_dtype=torch.float32)
    assert torch.equal(out.cpu(), torch.tensor([[448.0 * 3 * 256], [0]]).expand(2, 8))


@both_configs
@pytest.mark.parametrize(("scales", "out_features"), [("channel", 19), ("block", 128)])
def test_gated(device, config, scales, out_features):
    inputs, random = fp8_case(device, 2, 256, out_features, torch.float16, scales, norm="rms", gated=True)
    check(inputs | {"gated": True, "activation": "silu", "bias": random(2 * out_features)}, config)


@both_configs
@both_scales
def test_bias_and_the_residual_in_place(device, config, scales):
    inputs, random = fp8_case(device, 2, 256, 24, torch.float16, scales)
    wide = random(2, 48)
    inputs |= {"residual": wide[:, 16:40], "bias": random(24)}
    expected, before = exact(**inputs), wide.clone()
    skinny_linear(**inputs, out=inputs["residual"], config=config)
    assert_close(wide[:, 16:40], expected)
    assert torch.equal(wide[:, :16], before[:, :16]) and torch.equal(wide[:, 40:], before[:, 40:])


@both_scales
def test_a_row_does_not_depend_on_the_other(device, scales):
    inputs, _ = fp8_case(device, 2, 256, 24, torch.bfloat16, scales, norm="rms")
    together = skinny_linear(**inputs, config=SMALL)
    inputs["x"] = torch.stack((inputs["x"][0] * 100, inputs["x"][1]))
    assert torch.equal(skinny_linear(**inputs, config=SMALL)[1], together[1])
