"""Compiled functions for rows of a step on a CPU, built from `rows.c` with the package if there is a C compiler.

Everything works without them, in PyTorch's operators. They save the operators' own time, which is most of a step of one
row: an int8 layer is one call. They need x86-64, Linux and AVX2.
"""

from copy import copy
from typing import Any

import torch

try:
    from roseinfer.kernels.cpu import _rows
except ImportError:
    _rows = None

# Version of the functions' arguments, also in rows.c: those of an older installation are not used.
INTERFACE_VERSION = 4
if _rows is not None and _rows.INTERFACE_VERSION != INTERFACE_VERSION:
    _rows = None

# Numbers of a row that the loops handle at once.
MULTIPLE_COLUMNS = 64
_MULTIPLE_ROWS = 4  # of a product at once
_ACTIVATIONS = {None: 0, "gelu_tanh": 1, "silu": 2}

# Weight, bias (None: an RMSNorm) and epsilon of a norm.
NormArguments = tuple[torch.Tensor, torch.Tensor | None, float]


def instructions() -> str | None:
    """Return the instructions for int8 that are in use; None without the compiled functions."""
    return None if _rows is None else _rows.INSTRUCTIONS


def use(instructions: str) -> bool:
    """Compute products by these instructions from now on; return False, and change nothing, if the CPU lacks them.

    The fastest are in use without it. Tests and measurements compare the others with them.
    """
    return bool(_rows.use(instructions))


def has_activation(name: str | None) -> bool:
    """Return True if `Int8Rows` applies this activation."""
    return name in _ACTIVATIONS


def activates(x: torch.Tensor, activation: str) -> bool:
    """Return True if `activate` takes x and this activation."""
    floats = x.dtype is torch.float32 and x.device.type == "cpu" and x.ndim == 2 and x.is_contiguous()
    return _rows is not None and floats and activation in _ACTIVATIONS


class Int8Rows:
    """Product of rows by int8 codes, with the operations before and after it in one call.

    x [T, K] float32 is normed, rotated in blocks of `block` columns, and rounded to multiples of a row's largest number
    / `max_code`. The result is activation(x @ (codes * scales).T + bias) + residual. Sums are exact, so a row's result
    depends neither on other rows nor on `threads`.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        block: int,
        max_code: int,
        activation: str | None = None,
        threads: int,
    ) -> None:
        """codes: [N, K] int8; the caller may drop them. scales: [N] float32. bias: [N] float32."""
        self._shape = tuple(codes.shape)
        self._block, self._max_code, self._threads, self._bias = block, max_code, threads, bias
        steps = scales * torch.tensor(1 / max_code)
        shifts = codes.sum(1, dtype=torch.int32).mul_(max_code + 1)
        self._kept = (_interleaved(codes), steps, shifts, bias)
        self.out_width = len(codes)
        self._set_activation(activation)

    def _set_activation(self, activation: str | None) -> None:
        self._activation = _ACTIVATIONS[activation]
        addresses = [_address(tensor) for tensor in self._kept]
        after = (self._activation, self._threads)
        self._weight = _rows.weight(*self._shape, self._block, self._max_code, *addresses, *after)

    def bare(self) -> "Int8Rows":
        """Return the product without the activation; it shares the weight."""
        other = copy(self)
        other._set_activation(None)
        return other

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        norm: NormArguments | None,
    ) -> None:
        """Write the result [T, N] to `out`; all tensors are contiguous float32. norm: of a norm before the product."""
        weight, bias, eps = norm or _NO_NORM
        _rows.linear(
            self._weight,
            x.shape[0],
            x.data_ptr(),
            _address(residual),
            out.data_ptr(),
            _address(weight),
            _address(bias),
            eps,
        )

    def codes_of(self, x: torch.Tensor, norm: NormArguments | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes [T, K] uint8 of rows, shifted by max_code + 1, and the largest number of each [T]."""
        weight, bias, eps = norm or _NO_NORM
        codes, largest = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape[0])
        before = (self._block, _address(weight), _address(bias), eps, self._max_code)
        _rows.prepare(x.data_ptr(), *x.shape, *before, codes.data_ptr(), largest.data_ptr(), self._threads)
        return codes, largest

    def finish(self, y: torch.Tensor, largest: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the result to `out` for y [T, N]: the products of codes times scales / max_code."""
        after = (_address(self._bias), self._activation, _address(residual))
        _rows.finish(y.data_ptr(), *y.shape, largest.data_ptr(), *after, out.data_ptr(), self._threads)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(x) for x [T, N], contiguous float32, with the bits of an `Int8Rows` with this activation."""
    out = torch.empty(x.shape)
    after = (0, 0, _ACTIVATIONS[activation], 0)
    _rows.finish(x.data_ptr(), *x.shape, *after, out.data_ptr(), torch.get_num_threads())
    return out


def _interleaved(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [N, K] in the order in which they are read: [N / 4, K / 64, 4, 64], zeros after the last row."""
    rows, columns = codes.shape
    padded = torch.zeros(-(-rows // _MULTIPLE_ROWS) * _MULTIPLE_ROWS, columns, dtype=torch.int8)
    padded[:rows] = codes
    return padded.view(-1, _MULTIPLE_ROWS, columns // MULTIPLE_COLUMNS, MULTIPLE_COLUMNS).transpose(1, 2).contiguous()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_NO_NORM: tuple[Any, Any, float] = (None, None, 0.0)
