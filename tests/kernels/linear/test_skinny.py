"""`skinny_linear` against float64, over everything it fuses, both ways of multiplying and ragged shapes."""

from itertools import product

import pytest
import torch

from roseinfer.kernels.linear.skinny import (
    MAX_ROWS,
    SkinnyNorm,
    skinny_linear,
    skinny_linear_reference,
    supports,
)
from roseinfer.kernels.linear.skinny_configs import choose_config, rule
from tests.helpers.cases import each_value, pairwise
from tests.helpers.skinny import CONFIGS, KINDS, assert_close, case, dtype_of, exact


def check(inputs, config=None, **options):
    assert_close(skinny_linear(**inputs, config=config, **options), exact(**inputs))


@pairwise(
    config=CONFIGS,
    size={"one row": (1, 64, 8), "some rows": (3, 96, 13), "wide": (5, 200, 37), "all rows": (16, 131, 9)},
    norm=[None, "rms", "layer"],
    kind=KINDS,
)
def test_products_of_ragged_shapes(device, config, kind, norm, size):
    rows, in_features, out_features = size
    check(case(device, rows, in_features, out_features, dtype_of(kind, config), norm=norm)[0], config)


@each_value(config=CONFIGS, activation=[None, "silu", "gelu", "gelu_tanh"], kind=KINDS)
def test_bias_activation_and_residual(device, config, kind, activation):
    inputs, random = case(device, 3, 128, 21, dtype_of(kind, config), norm="layer")
    inputs |= {"bias": random(21), "residual": random(3, 21), "activation": activation}
    check(inputs, config)


@pairwise(config=CONFIGS, activation=["silu", "gelu_tanh"], biased=[False, True], kind=KINDS)
def test_gated(device, config, kind, activation, biased):
    inputs, random = case(device, 2, 160, 19, dtype_of(kind, config), norm="rms", gated=True)
    inputs |= {"gated": True, "activation": activation, "bias": random(38) if biased else None}
    check(inputs, config)


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_every_number_of_rows_with_the_chosen_config(device, rows):
    inputs, random = case(device, rows, 96, 40, torch.float16, norm="rms")
    inputs["residual"] = random(rows, 40)
    check(inputs)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_strided_inputs_and_the_residual_in_place(device, config):
    inputs, random = case(device, 4, 128, 24, torch.float16, norm="rms")
    wide_x, wide_residual = random(4, 3, 128), random(4, 48)
    wide_x[:, 1] = inputs["x"]
    inputs |= {"x": wide_x[:, 1], "residual": wide_residual[:, 16:40]}
    expected, before = exact(**inputs), wide_residual.clone()
    out = skinny_linear(**inputs, out=inputs["residual"], config=config)
    assert out.data_ptr() == inputs["residual"].data_ptr()
    assert_close(wide_residual[:, 16:40], expected)
    assert torch.equal(wide_residual[:, :16], before[:, :16]) and torch.equal(wide_residual[:, 40:], before[:, 40:])


def test_other_output_dtype(device):
    """Products of float16 are exact in float32, so nothing is lost."""
    inputs, _ = case(device, 2, 64, 24, torch.float16)
    out = skinny_linear(**inputs, out_dtype=torch.float32)
    assert out.dtype is torch.float32
    assert_close(out, exact(**inputs))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_row_does_not_depend_on_the_others(device, config):
    inputs, _ = case(device, 8, 96, 24, dtype_of("bfloat16", config), norm="rms")
    together = skinny_linear(**inputs, config=config)
    x = inputs["x"]
    for row in (0, 5):
        others = torch.randn_like(x) * 100
        others[row] = x[row]
        inputs["x"] = others
        assert torch.equal(skinny_linear(**inputs, config=config)[row], together[row])


def test_a_large_residual_stream_in_float16(device):
    """x times the norm's weight exceeds float16's range, the normed x does not."""
    inputs, _ = case(device, 2, 128, 16, torch.float16, norm="rms")
    inputs["x"] = inputs["x"] * 4000
    inputs["norm"].weight.mul_(10)
    check(inputs)


@pytest.mark.parametrize("gated", [False, True])
def test_reference_agrees_with_float64(device, gated):
    inputs, random = case(device, 3, 64, 24, torch.float32, norm="layer", gated=gated)
    inputs |= {"gated": gated, "activation": "gelu_tanh", "bias": random(48 if gated else 24)}
    if not gated:
        inputs["residual"] = random(3, 24)
    assert_close(skinny_linear_reference(**inputs), exact(**inputs))


def test_supports():
    weight = torch.zeros(8, 16, dtype=torch.bfloat16)
    assert supports(1, weight) and supports(MAX_ROWS, weight)
    assert not supports(0, weight) and not supports(MAX_ROWS + 1, weight)
    assert not supports(1, weight.float()) and not supports(1, weight.T)


REAL_SHAPES = [(2304, 768), (768, 3072), (50257, 768), (1024, 3072), (6144, 4096), (4096, 12288), (151936, 1024)]


@pytest.mark.parametrize("gated", [False, True])
def test_chosen_configs_can_run(gated):
    for bucket, (weight_rows, columns) in product((1, 2, 4, 8, 16), [*REAL_SHAPES, (24576, 4096), (6, 5)]):
        shape = (bucket, weight_rows, columns, gated)
        config = choose_config(*shape) or rule(*shape)
        for value in (config.block_n, config.block_k, config.warps):
            assert value & (value - 1) == 0, shape
        assert config.block_k >= 16 * config.warps, shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("out_features", "in_features"), REAL_SHAPES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_real_shapes(device, rows, in_features, out_features, overlap):
    inputs, random = case(device, rows, in_features, out_features, torch.bfloat16, norm="rms")
    inputs["residual"] = random(rows, out_features)
    check(inputs, overlap=overlap)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_overlapping_kernels_wait_for_each_other(device):
    """A long chain through one residual buffer gives the same bits as kernels one after another."""
    inputs, random = case(device, 4, 1024, 1024, torch.bfloat16)
    weights = [random(1024, 1024, scale=1 / 32) for _ in range(16)]
    norm = SkinnyNorm(random(1024) + 1, 1e-5)

    def chain(overlap):
        stream, hidden = inputs["x"].clone(), torch.empty_like(inputs["x"])
        for weight in weights:
            skinny_linear(stream, weight, norm=norm, activation="silu", out=hidden, overlap=overlap)
            skinny_linear(hidden, weight, residual=stream, out=stream, overlap=overlap)
        return stream

    expected = chain(False)
    for _ in range(20):
        assert torch.equal(chain(True), expected)
