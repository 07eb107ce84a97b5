"""Products of FP8 against float64 on the widened factors. They need a GPU of capability 9.0, or run on a CPU."""

import pytest
import torch

from roseinfer.kernels.linear.fp8_product import Fp8Factor
from roseinfer.kernels.linear.fp8_rows import rows_reference
from roseinfer.kernels.linear.fp8_tiles import Parts


@pytest.fixture(autouse=True)
def _needs_hopper_or_a_cpu():
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("FP8 products need compute capability 9.0")


def weight(rows, columns, device, *, block):
    codes = (torch.randn(rows, columns, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (-(-rows // 128), columns // 128) if block else (rows,)
    return codes, (0.5 + torch.rand(shape, device=device)) / 100 / columns**0.5


def widened(codes, scales):
    if scales.ndim == 1:
        return codes.double() * scales[:, None]
    spread = scales.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)
    return codes.double() * spread


# Seven blocks of columns are no multiple of four, and 640 rows are a rank's share of a stack.
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outs", "columns"), [(1, 128, 128), (17, 640, 512), (32, 208, 896), (260, 256, 384)])
def test_products(rows, outs, columns, dtype, block, device):
    codes, scales = weight(outs, columns, device, block=block)
    x = rows_reference(torch.randn(rows, columns, device=device), grouped=block)
    bias = torch.randn(outs, device=device).to(dtype)
    exact = x.widen().double() @ widened(codes, scales).T
    factor = Fp8Factor(codes, scales, Parts.allocate(device))
    by_library = (factor.by_library(x, dtype, None), exact), (factor.by_library(x, dtype, bias), exact + bias)
    for found, expected in (*by_library, (factor(x, dtype, bias), exact + bias)):
        assert found.shape == (rows, outs) and found.dtype is dtype
        error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert (error < 8e-3).all(), error
