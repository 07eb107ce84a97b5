"""Product of one row by a few rows of a weight in 16 bits after an RMSNorm, as a part of a kernel.

It is so small that a launch of its own would take longer than its work.
"""

from typing import NamedTuple

import torch

from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton

# Rows of the weight that a program multiplies, and the most columns that it takes at a time.
_PROGRAM_ROWS, _MAX_BLOCK_COLUMNS = 2, 2048


class SmallProduct(NamedTuple):
    """Product that a launch of `skinny_linear` computes besides its own, of the same input.

    weight: [N, in], bfloat16 or float16, contiguous. out: [M, N], contiguous, gets the result.
    """

    weight: torch.Tensor
    out: torch.Tensor

    @property
    def programs(self) -> int:
        return cdiv(len(self.weight), _PROGRAM_ROWS)

    def options(self) -> dict[str, object]:
        """Return arguments of a kernel that begins with `programs` programs of `write_small_product`."""
        return {
            "small_w_ptr": self.weight,
            "small_out_ptr": self.out,
            "small_width": len(self.weight),
            "SMALL_PROGRAMS": self.programs,
            "SMALL_ROWS": _PROGRAM_ROWS,
            "SMALL_COLUMNS": min(next_power_of_2(self.weight.shape[1]), _MAX_BLOCK_COLUMNS),
        }


@triton.jit
def columns_of(pointers, k, K: tl.constexpr, MASKED: tl.constexpr):
    """Load columns k as float32; zero past column K."""
    if MASKED:
        return tl.load(pointers, mask=k < K, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@triton.jit
def read_factors(w_ptr, norm_ptr, n, width, K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr):
    """Return rows n of a weight [width, K] times the norm's weight, BLOCK_K columns each, [rows, BLOCK_K] float32."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    rows = w_ptr + tl.minimum(n, width - 1)[:, None] * K
    k = tl.arange(0, BLOCK_K)[None, :]
    factors = ()
    for chunk in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        at = chunk * BLOCK_K + k
        w = columns_of(rows + at, at, K, MASKED)
        if NORM == "rms":
            w *= columns_of(norm_ptr + at, at, K, MASKED)
        factors += (w,)
    return factors


@triton.jit
def multiply_row(x_row, factors, eps, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the products [BLOCK_N] of a row of x by `read_factors`, and 1 / the root mean square of the row."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    k = tl.arange(0, BLOCK_K)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([1, BLOCK_K], tl.float32)
    for chunk in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        at = chunk * BLOCK_K + k
        x = columns_of(x_row + at, at, K, MASKED)
        squares += x * x
        sums += x * factors[chunk]
    return tl.sum(sums, 1), tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)


@triton.jit
def write_small_product(
    program, x_ptr, w_ptr, norm_ptr, out_ptr, rows, width, stride_x, eps, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the products of all rows of norm(x) by rows program * BLOCK_N and following of a weight [width, K]."""
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    factors = read_factors(w_ptr, norm_ptr, n, width, K, BLOCK_K, NORM)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for row in tl.range(rows):
        result, rstd = multiply_row(x_ptr + row * stride_x, factors, eps, K, BLOCK_N, BLOCK_K)
        if NORM == "rms":
            result *= rstd
        tl.store(out_ptr + row * width + n, result.to(out_ptr.dtype.element_ty), mask=n < width)
