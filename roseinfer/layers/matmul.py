"""Three ways to multiply by a weight matrix; on a CPU its layout decides the speed.

`PackedMatmul` keeps the weight in oneDNN's blocked layout only. benchmarks/cpu_gemm.py measures it against the others.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

# Rows that the packed layout is tuned for. One layout serves all: benchmarks/cpu_gemm.py finds it within a few per
# cent of the best one from 1 to 512 rows, where layouts tuned for 1 row lose up to half of the speed at 8 and 32.
TUNED_ROWS = 32
# A matrix that fits the cache gains nothing from packing, and the packed call costs some microseconds more.
MIN_PACKED_ELEMENTS = 1 << 17

_POINTWISE = {None: ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}


class Matmul(Protocol):
    """x [T, in] -> activation(x @ weight.T + bias) + residual [T, out], for a weight of [out, in]."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor: ...


def activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """`activation` as `ModelSpec` names it: None, "silu", "gelu" or "gelu_tanh"."""
    if activation is None:
        return x
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class PlainMatmul:
    """The weight as it is: `F.linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
        self._weight = weight
        self._bias = bias
        self._activation = activation

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = activate(F.linear(x, self._weight, self._bias), self._activation)
        return out if residual is None else out + residual


class PackedMatmul:
    """The weight reordered once for oneDNN; bias, activation and residual are fused into the product.

    The reordered weight takes as much memory as the plain one, which the caller may drop. A kernel is made the first
    time a number of rows is seen (about a millisecond for each weight shape) and then cached by oneDNN.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TUNED_ROWS)
        self._bias = bias
        self._attr, self._algorithm = _POINTWISE[activation]
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            return self._unary(x, self._weight, self._bias, self._attr, [], self._algorithm)
        assert self._attr == "none", "oneDNN fuses an activation or a residual, not both"
        return self._binary(x, residual, self._weight, self._bias, "add")


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this PyTorch and this CPU multiply by a packed `weight`, and it is large enough to gain."""
    if weight.device.type != "cpu" or weight.numel() < MIN_PACKED_ELEMENTS:
        return False
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_reorder_linear_weight"):
        return False
    if not hasattr(ops, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return hasattr(ops, "_is_mkldnn_bf16_supported") and ops._is_mkldnn_bf16_supported()
    if weight.dtype is torch.float16:
        return hasattr(ops, "_is_mkldnn_fp16_supported") and ops._is_mkldnn_fp16_supported()
    return weight.dtype is torch.float32


def make_matmul(weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> Matmul:
    """The fastest way that works here. The caller drops its own reference to `weight` to free the plain copy."""
    kind = PackedMatmul if can_pack(weight) else PlainMatmul
    return kind(weight, bias, activation)
