"""Products of many rows by four bits against float64: tiles, and the library by copies."""

import pytest
import torch

from roseinfer.kernels.linear.fp8_tile_configs import TileConfig
from roseinfer.kernels.linear.fp8_tiles import Parts
from roseinfer.kernels.linear.int4_product import Int4Factor, Int4Workspace
from roseinfer.kernels.linear.int4_tile_configs import BUCKETS, choose_int4_tile_config
from roseinfer.kernels.linear.int4_tiles import int4_tile_product, widen
from tests.helpers.cases import pairwise
from tests.helpers.int4 import NVFP4, four_bits_case
from tests.helpers.skinny import assert_close, exact

# The interpreter has no products in bfloat16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
CONFIGS = {
    "weight first": TileConfig(16, 64, 128, 1, 4, 3, weight_first=True),
    "shares": TileConfig(32, 64, 128, 3, 4, 3, weight_first=True),
    "rows first": TileConfig(64, 64, 128, 1, 4, 3, weight_first=False),
}


def draw(device, *shape):
    return torch.randn(shape).to(DTYPE).to(device)


@pairwise(
    config=CONFIGS,
    group=[NVFP4, 32, 64, 128, 0],
    symmetric=[False, True],
    size={"one block": (17, 384, 70), "two": (40, 352, 64)},
    extra=[None, "bias", "residual"],
)
def test_tiles(device, config, group, symmetric, size, extra):
    rows, columns, outs = size
    if columns % (group or columns):
        group = 32
    weight, wide = four_bits_case(device, outs, columns, group or columns, symmetric=symmetric)
    x = draw(device, rows, columns)
    options = {} if extra is None else {extra: draw(device, *((outs,) if extra == "bias" else (rows, outs)))}
    expected = exact(x, wide, **options)
    assert_close(int4_tile_product(x, weight, config, Parts.allocate(device), **options), expected)


def test_a_row_does_not_depend_on_the_others(device):
    weight, _ = four_bits_case(device, 64, 384, 128)
    x, parts = draw(device, 17, 384), Parts.allocate(device)
    together = int4_tile_product(x, weight, CONFIGS["shares"], parts)
    other = draw(device, 17, 384) * 100
    other[5] = x[5]
    assert torch.equal(int4_tile_product(other, weight, CONFIGS["shares"], parts)[5], together[5])


@pytest.mark.parametrize("group", [NVFP4, 32, 352])
def test_widened_copies(device, group):
    weight, wide = four_bits_case(device, 40, 352, group)
    out = torch.empty(24, 352, dtype=DTYPE, device=device)
    widen(weight, slice(8, 32), out)
    assert (out - wide[8:32]).abs().max() < 0.01 * wide.abs().max()


@pairwise(extra=[None, "bias", "residual"], group=[NVFP4, 64])
def test_the_library_by_parts_of_the_weight(device, monkeypatch, extra, group):
    monkeypatch.setattr("roseinfer.kernels.linear.int4_product._MAX_COPY_ELEMENTS", 130 * 256)
    weight, wide = four_bits_case(device, 300, 256, group)
    x = draw(device, 5, 256)
    options = {} if extra is None else {extra: draw(device, *((300,) if extra == "bias" else (5, 300)))}
    expected = exact(x, wide, **options)
    assert_close(Int4Factor(weight, Int4Workspace.allocate(torch.device(device))).by_library(x, **options), expected)


def test_configs_fit_the_kernel():
    for outs, columns in ((64, 96), (4096, 4096), (24576, 4096), (3584, 18944)):
        for bucket in BUCKETS:
            config = choose_int4_tile_config(bucket, outs, columns)
            assert config is None or -(-columns // 128) * 128 % (config.block_k * config.shares) == 0
    assert choose_int4_tile_config(BUCKETS[-1] + 1, 4096, 4096) is None
