"""`skinny_linear` with the weight loaded to the matrix units' registers, against float64. Gluon kernels need a GPU."""

import pytest
import torch

from roseinfer.kernels.linear.skinny import skinny_linear
from roseinfer.kernels.linear.skinny_configs import DirectConfig, SkinnyConfig, choose_config, direct_rule
from tests.helpers.cases import pairwise
from tests.helpers.skinny import KINDS, case, exact

CONFIGS = {
    "blocks ahead": DirectConfig(block_n=16, block_k=512, ahead=True, max_registers=128),
    "two tiles": DirectConfig(block_n=32, block_k=1024, warps=8),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Gluon kernels need a GPU")


@needs_gpu
@pairwise(
    config=CONFIGS,
    size={"few rows": (2, 2048, 48), "some rows": (5, 1024, 37), "all rows": (16, 3072, 64)},
    norm=[None, "rms", "layer"],
    kind=KINDS,
    gated=[False, True],
    overlap=[False, True],
)
def test_products(device, config, size, norm, kind, gated, overlap):
    rows, in_features, out_features = size
    inputs, random = case(device, rows, in_features, out_features, getattr(torch, kind), norm=norm, gated=gated)
    inputs |= {"gated": True, "activation": "silu"} if gated else {"residual": random(rows, out_features)}
    inputs["bias"] = random(len(inputs["weight"]))
    out, expected = skinny_linear(**inputs, config=config, overlap=overlap), exact(**inputs)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < {"bfloat16": 8e-3, "float16": 1e-3}[kind], error  # which rounding the norm's result is part of


@needs_gpu
def test_a_row_does_not_depend_on_the_others(device):
    inputs, _ = case(device, 8, 1024, 64, torch.bfloat16, norm="rms")
    config, x = CONFIGS["blocks ahead"], inputs["x"]
    together = skinny_linear(**inputs, config=config)
    inputs["x"] = torch.randn_like(x) * 100
    inputs["x"][5] = x[5]
    assert torch.equal(skinny_linear(**inputs, config=config)[5], together[5])


def test_configs_without_gluon():
    shape = (4096, 4096, False)
    assert isinstance(choose_config(8, *shape), DirectConfig) and isinstance(choose_config(2, *shape), DirectConfig)
    assert choose_config(8, *shape, direct=False) is None
    assert isinstance(choose_config(2, *shape, direct=False), SkinnyConfig)


@pytest.mark.parametrize("columns", [512, 1024, 1536, 4096, 12288])
@pytest.mark.parametrize("weight_rows", [64, 4096, 24576])
def test_the_rule_fits_the_kernel(weight_rows, columns):
    for gated in (False, True):
        config = direct_rule(weight_rows, columns, gated)
        assert config is not None
        assert columns % config.block_k == 0 and config.block_k % (128 * config.warps) == 0
        assert (2 if gated else 1) * config.block_n % 16 == 0
    assert direct_rule(weight_rows, columns + 256, False) is None
