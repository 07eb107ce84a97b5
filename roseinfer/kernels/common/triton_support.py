"""The one place that knows whether Triton is installed.

Kernel modules take `triton` and `tl` from here, so that they can be imported, and their reference functions used,
without Triton; launching a kernel needs it.
"""

from types import SimpleNamespace
from typing import Any

HAS_TRITON: bool
triton: Any
tl: Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False


def _unavailable(*args: Any, **options: Any) -> Any:
    """Stands in for `triton.jit`, with and without options: what it decorates stays a plain function."""
    return args[0] if args else _unavailable


class _Constant:
    """Stands in for `tl.constexpr`, as an annotation and as what holds a constant."""

    def __init__(self, value: object) -> None:
        self.value = value


def tensor_descriptor(matrix: Any, rows: int, columns: int) -> Any:
    """A contiguous matrix, to be read in blocks of rows x columns; what is outside is zero."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])


if not HAS_TRITON:
    triton = SimpleNamespace(jit=_unavailable)
    tl = SimpleNamespace(constexpr=_Constant)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)
