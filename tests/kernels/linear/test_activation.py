import pytest
import torch

from roseinfer.kernels.linear.activation import (
    add_times_sigmoid,
    add_times_sigmoid_reference,
    gated,
    gated_reference,
    multiply_by_sigmoid,
    multiply_by_sigmoid_reference,
    pointwise,
    pointwise_reference,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's exponentials
ACTIVATIONS = ["silu", "gelu", "gelu_tanh"]
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


def spread(rows, width, dtype, device):
    """Return numbers of every size, as columns of a wider tensor."""
    x = torch.full((rows, width + 8), torch.nan, dtype=dtype, device=device)
    x[:, :width] = torch.randn(rows, width, device=device) * torch.tensor([0.01, 1.0, 10.0], device=device)[:rows, None]
    return x[:, :width]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 64), (3, 3072), (2, 1111)])
def test_gated(shape, activation, dtype, device):
    gate_up = spread(shape[0], 2 * shape[1], dtype, device)
    torch.testing.assert_close(gated(gate_up, activation), gated_reference(gate_up, activation), **TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 64), (3, 3072), (2, 1111)])
def test_pointwise(shape, activation, dtype, device):
    x = spread(*shape, dtype, device)
    changed, expected = x.clone(), pointwise_reference(x.clone(), activation)
    assert pointwise(changed, activation) is changed
    torch.testing.assert_close(changed, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(1, 64), (3, 3072), (2, 1111)])
def test_multiply_by_sigmoid(shape, dtype, device):
    x, gate = spread(*shape, dtype, device), spread(*shape, dtype, device)
    expected = multiply_by_sigmoid_reference(x.clone(), gate)
    assert multiply_by_sigmoid(x, gate) is x
    torch.testing.assert_close(x, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(1, 64), (3, 3072), (2, 1111)])
def test_add_times_sigmoid(shape, dtype, device):
    total, x, gate = torch.randn(shape, device=device).to(dtype), spread(*shape, dtype, device), torch.randn(shape)
    gate = gate.to(device, dtype)[:, :1]
    expected = add_times_sigmoid_reference(total.clone(), x, gate)
    assert add_times_sigmoid(total, x, gate) is total
    torch.testing.assert_close(total, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_out(activation, device):
    """The exponential overflows or vanishes."""
    x = torch.tensor([[-3e4, -100.0, 0.0, 100.0, 3e4]], device=device)
    assert pointwise(x.clone(), activation).tolist() == [[0.0, 0.0, 0.0, 100.0, 3e4]]


def test_neighbours_are_left_alone(device):
    wide = torch.randn(4, 40, device=device)
    before = wide.clone()
    pointwise(wide[:, 8:24], "silu")
    assert torch.equal(wide[:, :8], before[:, :8]) and torch.equal(wide[:, 24:], before[:, 24:])
    assert not torch.equal(wide[:, 8:24], before[:, 8:24])
