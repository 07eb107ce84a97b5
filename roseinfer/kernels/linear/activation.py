"""Activation functions of feed-forward layers, computed in float32 and rounded once.

Names as in `ModelSpec`: "silu", "gelu" (with erf) and "gelu_tanh". Products that fuse their epilogue use `activate`,
too.
"""

import torch
import torch.nn.functional as F

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.clamped_swish import clamped_swish
from roseinfer.kernels.common.triton_support import cdiv, tl, triton

BLOCK_ELEMENTS = 1024  # per program: 16 bytes of a 16-bit type for each of 128 threads


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply ACTIVATION to x in float32; any other name, such as "none", returns x as it is."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(z)) = sigmoid(2 z), z = sqrt(2 / pi) * (x + 0.044715 x^3)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def activate_gated(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up in float32, or `clamped_swish` of them, for the activation of that name."""
    if ACTIVATION == "clamped_swish":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return (up + 1.0) * (gate * tl.sigmoid(1.702 * gate))
    else:
        return activate(gate, ACTIVATION) * up


@triton.jit
def _gated_kernel(
    gate_up_ptr, out_ptr, stride, N: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    at = gate_up_ptr + row * stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    out = activate_gated(gate, up, ACTIVATION)
    tl.store(out_ptr + row * N + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _pointwise_kernel(
    x_ptr, stride, N: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    at = x_ptr + row * stride + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, activate(x, ACTIVATION).to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid_kernel(
    x_ptr, gate_ptr, x_stride, gate_stride, N: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    at = x_ptr + row * x_stride + column
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (x * tl.sigmoid(gate)).to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(
    total_ptr, x_ptr, gate_ptr, stride, gate_stride, N: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    factor = tl.sigmoid(tl.load(gate_ptr + row * gate_stride).to(tl.float32))
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    at = total_ptr + row * N + column
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + factor * x
    tl.store(at, total.to(total_ptr.dtype.element_ty), mask=inside)


def gated(gate_up: torch.Tensor, activation: str, *, block: int = BLOCK_ELEMENTS, num_warps: int = 4) -> torch.Tensor:
    """Return activation(gate) * up [T, I]. gate_up: [T, 2 * I], gate first, its rows may be apart."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated_kernel[(rows, cdiv(width, block))](
            gate_up,
            out,
            gate_up.stride(0),
            N=width,
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=num_warps,
            **early_start.options(gate_up.device),
        )
    return out


def pointwise(x: torch.Tensor, activation: str, *, block: int = BLOCK_ELEMENTS, num_warps: int = 4) -> torch.Tensor:
    """Apply the activation to x in place, and return x. x: [T, N], its rows may be apart."""
    rows, width = x.shape
    assert x.stride(1) == 1
    if rows:
        _pointwise_kernel[(rows, cdiv(width, block))](
            x,
            x.stride(0),
            N=width,
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=num_warps,
            **early_start.options(x.device),
        )
    return x


def multiply_by_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply x by sigmoid(gate) in place, and return x. x, gate: [T, N], their rows may be apart."""
    rows, width = x.shape
    assert gate.shape == x.shape and x.stride(1) == gate.stride(1) == 1
    if rows:
        _sigmoid_kernel[(rows, cdiv(width, BLOCK_ELEMENTS))](
            x,
            gate,
            x.stride(0),
            gate.stride(0),
            N=width,
            BLOCK=BLOCK_ELEMENTS,
            num_warps=4,
            **early_start.options(x.device),
        )
    return x


def multiply_by_sigmoid_reference(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.copy_(x.float() * gate.float().sigmoid())


def add_times_sigmoid(total: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Add sigmoid(gate) * x to `total` in place, and return it. total: [T, N], contiguous; x: [T, N], gate: [T, 1],
    their rows may be apart.
    """
    rows, width = x.shape
    assert total.is_contiguous() and total.shape == x.shape and x.stride(1) == 1 and gate.shape == (rows, 1)
    if rows:
        _add_kernel[(rows, cdiv(width, BLOCK_ELEMENTS))](
            total,
            x,
            gate,
            x.stride(0),
            gate.stride(0),
            N=width,
            BLOCK=BLOCK_ELEMENTS,
            num_warps=4,
            **early_start.options(x.device),
        )
    return total


def add_times_sigmoid_reference(total: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return total.copy_(total.float() + x.float() * gate.float().sigmoid())


def gated_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    if activation == "clamped_swish":
        return clamped_swish(gate, up).to(gate_up.dtype)
    return (activate_reference(gate, activation) * up).to(gate_up.dtype)


def pointwise_reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    return x.copy_(activate_reference(x.float(), activation))


def activate_reference(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    if activation is None:
        return x
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
