"""Optional import of Triton.

Kernel modules take `triton` and `tl` from here, so that they can be imported, and their reference functions used,
without Triton. Only launching a kernel needs it.
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


def unavailable(*args: Any, **options: Any) -> Any:
    """Stand-in for `triton.jit`, with and without options: the decorated function stays a plain function."""
    return args[0] if args else unavailable


class _Constant:
    """Stand-in for `tl.constexpr`, as an annotation and as the holder of a constant."""

    def __init__(self, value: object) -> None:
        self.value = value


def tensor_descriptor(matrix: Any, rows: int, columns: int) -> Any:
    """Return a descriptor of a contiguous matrix, to read in blocks of rows x columns; elements outside are zero."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])


if not HAS_TRITON:
    triton = SimpleNamespace(jit=unavailable)
    tl = SimpleNamespace(constexpr=_Constant)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)
