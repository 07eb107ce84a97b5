"""Products in plain PyTorch and by oneDNN. On a CPU the layout of a weight decides the speed.

`PackedMatmul` keeps the weight in oneDNN's blocked layout only. docs/research/2026-11-kernels.md compares layouts.
"""

import math
from collections.abc import Callable
from copy import copy
from types import TracebackType

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.clamped_swish import clamped_swish
from roseinfer.kernels.cpu import native
from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Norm

# Rows that the packed layout is tuned for. One layout serves all numbers of rows: from 1 to 512 it is within a few
# percent of the best one, while layouts tuned for 1 row lose up to half of the speed at 8 and 32.
TUNED_ROWS = 32
# A matrix that fits the cache gains nothing from packing, and the packed call costs some microseconds more.
MIN_PACKED_ELEMENTS = 1 << 17

_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR
_LINEAR = torch.tensor(_GELU_LINEAR)

_POINTWISE = {None: ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}


def activate(x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """Return the epilogue of x [T, N], which may overwrite x."""
    name = epilogue.activation
    if epilogue.gated:
        gate, up = x.chunk(2, -1)
        return clamped_swish(gate, up) if name == "clamped_swish" else _ACTIVATIONS[name](gate).mul_(up)
    return native.activate(x, name) if name and native.activates(x, name) else _ACTIVATIONS[name](x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return x / 2 * (1 + tanh(z)) = x * sigmoid(2z), where z = sqrt(2 / pi) * (x + 0.044715 x^3).

    PyTorch's own function takes twice as long in float32 for more than a few rows: its tanh is slower than its sigmoid.
    """
    if x.dtype is not torch.float32:
        return F.gelu(x, approximate="tanh")
    return torch.add(_LINEAR, x * x, alpha=_GELU_CUBIC).mul_(x).sigmoid_().mul_(x)


# Names of activations as in `Epilogue`.
_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
}


class SingleThread:
    """Context in which the calling thread computes alone. Entering and leaving it takes a quarter of a microsecond.

    Starting a sleeping thread takes 20 us and more, and on a busy machine its core may have other work.
    """

    __slots__ = ("_threads",)

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self._threads)


class PlainMatmul:
    """Product by the weight as it is: `F.linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue = NO_EPILOGUE) -> None:
        self._weight = weight
        self._bias = bias
        self._epilogue = epilogue

    def bare(self) -> "PlainMatmul":
        return PlainMatmul(self._weight, self._bias)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        result = activate(F.linear(x, self._weight, self._bias), self._epilogue)
        if residual is not None:
            result = result + residual
        return result if out is None else out.copy_(result)

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self(norm(x), None, out)


class PackedMatmul:
    """Product by a weight that is reordered once for oneDNN, with bias, activation and residual fused in.

    The reordered weight takes as much memory as the plain one, which the caller may drop. oneDNN builds a kernel the
    first time it sees a number of rows (about a millisecond for each weight shape), and caches it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue = NO_EPILOGUE) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TUNED_ROWS)
        self._bias = bias
        self._set_epilogue(epilogue)

    def _set_epilogue(self, epilogue: Epilogue) -> None:
        self._left = epilogue if epilogue.gated else None
        self._attr, self._algorithm = _POINTWISE[None if epilogue.gated else epilogue.activation]
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def bare(self) -> "PackedMatmul":
        other = copy(self)
        other._set_epilogue(NO_EPILOGUE)
        return other

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if residual is None:
            result = self._unary(x, self._weight, self._bias, self._attr, [], self._algorithm)
        else:
            assert self._attr == "none", "oneDNN fuses an activation or a residual, not both"
            result = self._binary(x, residual, self._weight, self._bias, "add")
        if self._left is not None:
            result = activate(result, self._left)
        return result if out is None else out.copy_(result)

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self(norm(x), None, out)


def can_pack(weight: torch.Tensor) -> bool:
    """Return True if this PyTorch and CPU support a packed `weight`, and it is large enough to gain from packing."""
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
