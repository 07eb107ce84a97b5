"""`tile_product` against float64 on the widened factors, both ways round, with and without shares."""

import pytest
import torch

from roseinfer.kernels.linear.fp8_rows import Fp8Rows, rows_reference
from roseinfer.kernels.linear.fp8_tile_configs import TileConfig
from roseinfer.kernels.linear.fp8_tiles import Parts, tile_product
from tests.kernels.linear.test_fp8_product import weight, widened

CONFIGS = {
    "weight first": TileConfig(16, 64, 128, 1, 4, 4, True),
    "weight first, shares": TileConfig(32, 64, 128, 3, 4, 3, True),
    "weight ahead": TileConfig(16, 64, 128, 1, 4, 0, True, ahead=True),
    "weight ahead, shares": TileConfig(32, 128, 128, 3, 4, 0, True, ahead=True),
    "rows first": TileConfig(64, 64, 128, 1, 4, 3, False),
    "rows first, shares": TileConfig(64, 128, 128, 3, 8, 2, False),
}


@pytest.fixture(autouse=True)
def _needs_hopper_or_a_cpu():
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the tensor memory accelerator needs compute capability 9.0")


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["channel", "block"])
def block(request):
    return request.param


@pytest.fixture(scope="module")
def parts(device):
    return Parts.allocate(device)


def assert_close(found, expected):
    error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert found.shape == expected.shape
    assert (error < 8e-3).all(), error  # NaN fails too


# 208 outputs end within a tile and a block of scales.
@pytest.mark.parametrize(("rows", "outs"), [(1, 128), (17, 208), (70, 64)])
def test_products(config, block, rows, outs, parts, device):
    codes, scales = weight(outs, 384, device, block=block)
    x = rows_reference(torch.randn(rows, 384, device=device), grouped=block)
    exact = x.widen().double() @ widened(codes, scales).T
    assert_close(tile_product(x, codes, scales, config, parts, dtype=torch.float16), exact)
    assert not parts.arrived.any(), "ready for the next product"


def test_bias_and_a_residual_whose_rows_lie_apart(config, block, parts, device):
    codes, scales = weight(128, 384, device, block=block)
    x = rows_reference(torch.randn(5, 384, device=device), grouped=block)
    bias, wide = torch.randn(128, device=device).half(), torch.randn(5, 160, device=device).half()
    residual, beside = wide[:, :128], wide[:, 128:].clone()
    expected = x.widen().double() @ widened(codes, scales).T + bias + residual
    found = tile_product(x, codes, scales, config, parts, dtype=torch.float16, bias=bias, residual=residual)
    assert found is residual and torch.equal(wide[:, 128:], beside)
    assert_close(found, expected)


def test_a_row_does_not_depend_on_the_others(config, block, parts, device):
    codes, scales = weight(128, 384, device, block=block)
    x = rows_reference(torch.randn(20, 384, device=device), grouped=block)
    together = tile_product(x, codes, scales, config, parts, dtype=torch.float16)
    for rows in (slice(0, 4), slice(12, 20)):
        some = x.scales[rows] if not block else x.scales[rows].t().contiguous().t()
        alone = tile_product(Fp8Rows(x.codes[rows], some, 4), codes, scales, config, parts, dtype=torch.float16)
        assert torch.equal(alone, together[rows][:4])
