import pytest
import torch

from roseinfer.kernels.linear.norm import (
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
}
SHAPES = [(1, 768), (3, 1024), (2, 100), (5, 4096), (1, 5120), (2, 1)]


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


def rows_apart(rows, width, dtype, device):
    """Return [rows, width] of a wider tensor, whose other columns are NaN."""
    wide = torch.full((rows, width + 16), torch.nan, dtype=dtype, device=device)
    wide[:, :width] = torch.randn(rows, width, device=device)
    return wide[:, :width]


@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape, dtype, device):
    x = rows_apart(*shape, dtype, device)
    weight, bias = (torch.randn(shape[1], dtype=dtype, device=device) for _ in range(2))
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), **TOLERANCE[dtype])
    expected = layer_norm_reference(x, weight, bias, 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), expected, **TOLERANCE[dtype])


def test_statistics_are_float32(device):
    """The mean of squares of large float16 numbers overflows float16; a large mean swamps the variance in float16."""
    x = torch.full((1, 1024), 3e4, dtype=torch.float16, device=device)
    weight, bias = torch.ones(1024, dtype=torch.float16, device=device), torch.zeros_like(x[0])
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), torch.ones_like(x))
    x[0, ::2] += 32
    normed = layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(normed[0, :2].tolist(), [1.0, -1.0], rtol=1e-3, atol=1e-3)


def test_no_rows(device):
    weight = torch.ones(8, device=device)
    assert rms_norm(torch.empty(0, 8, device=device), weight, 1e-6).shape == (0, 8)


def test_norm_added_to_a_residual(dtype, device):
    x, residual = rows_apart(3, 100, dtype, device), torch.randn(3, 100, device=device).to(dtype)
    weight = torch.randn(100, device=device)  # float32, as weights with an offset are
    expected = (residual.float() + 0.5 * rms_norm_reference(x.float(), weight, 1e-6)).to(dtype)
    result = rms_norm(x, weight, 1e-6, residual=residual, multiplier=0.5)
    assert result is residual
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])


def test_norm_of_a_sum(dtype, device):
    x, summand = rows_apart(3, 100, dtype, device), torch.randn(3, 100, device=device).to(dtype)
    weight, bias = (torch.randn(100, dtype=dtype, device=device) for _ in range(2))
    kept = summand.clone()
    expected = layer_norm_reference(x.float() + summand.float(), weight, bias, 1e-5).to(dtype)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5, summand=summand), expected, **TOLERANCE[dtype])
    assert torch.equal(summand, kept)
