"""Products of some rows by a small weight after a norm, on a GPU or interpreted, against float64."""

import pytest
import torch
import torch.nn.functional as F

from roseinfer.kernels.linear.fp8_tiles import Parts
from roseinfer.kernels.linear.normed_product import MAX_ROWS, normed_product


def exact(x, weight, norm):
    return F.rms_norm(x.double(), norm.shape, norm.double(), 1e-5) @ weight.double().T


def test_large_inputs_in_float16(device):
    x, weight = torch.randn(3, 512, device=device).half(), torch.randn(16, 512, device=device).half()
    x[1, 7] = 24_000
    norm, parts = torch.full((512,), 3.0, device=device), Parts.allocate(torch.device(device))
    expected = exact(x, weight, norm)
    found = normed_product(x, weight, norm, 1e-5, parts).double()
    assert ((found - expected).norm(dim=1) < 5e-3 * expected.norm(dim=1)).all()


@pytest.mark.parametrize(("rows", "outs", "columns"), [(1, 16, 128), (17, 40, 1100), (MAX_ROWS, 6, 512)])
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.float16])
def test_rows_that_lie_apart(rows, outs, columns, norm_dtype, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # of which the interpreter multiplies tiles
    x = (3 * torch.randn(rows, columns + 8, device=device)).to(dtype)[:, :columns]
    weight = (torch.randn(outs, columns, device=device) / columns**0.5).to(dtype)
    norm = (0.5 + torch.rand(columns, device=device)).to(norm_dtype)
    parts = Parts.allocate(torch.device(device))
    found, expected = normed_product(x, weight, norm, 1e-5, parts), exact(x, weight, norm)
    assert found.dtype is dtype and found.shape == expected.shape
    error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < 1e-2).all(), error
    assert not parts.arrived.any(), "ready for the next product"
    assert torch.equal(normed_product(x, weight, norm, 1e-5, parts), found)
    assert torch.equal(normed_product(x[:1], weight, norm, 1e-5, parts)[0], found[0]), "a row depends on others"
