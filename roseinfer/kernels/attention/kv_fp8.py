"""Conversion of K and V in FP8 (e4m3) for kernels: narrowed on the way in, widened in registers.

Queries and softmax weights that meet codes are float16, not bfloat16: a GPU has an exact instruction from two codes to
two float16, and float16 represents the factors more precisely.
"""

from roseinfer.kernels.common.fp8_codes import KERNEL_MAX_CODE
from roseinfer.kernels.common.triton_support import tl, triton

# Four codes to four float16 in two instructions. Not marked pure, so that the compiler does not move it.
_FOUR_WIDER: tl.constexpr = tl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def narrowed(x, scale):
    """Return the codes of x / scale, for float32 x, clamped to the range of codes. NaN stays NaN."""
    codes = tl.clamp(x / scale, -KERNEL_MAX_CODE, KERNEL_MAX_CODE, propagate_nan=tl.PropagateNan.ALL)
    return codes.to(tl.float8e4nv)


@triton.jit
def narrow_queries(queries):
    """Return queries in the dtype that codes are multiplied in, and the factor that the scores then need.

    bfloat16 queries become float16, divided by the power of two below the largest one, so that all numbers fit.
    """
    if queries.dtype == tl.bfloat16:
        wide = queries.to(tl.float32)
        largest = tl.maximum(tl.max(tl.max(tl.abs(wide), 1), 0), 1e-30)
        unit = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        return (wide / unit).to(tl.float16), unit
    else:
        return queries, 1.0


@triton.jit
def widened_values(x, like, COMPILED: tl.constexpr):
    """Widen values exactly, to the dtype of the keys before them. COMPILED: not interpreted, where assembly is
    unavailable.

    By itself the compiler would lay codes out for the matrix units and then widen them. These units want values of
    neighbouring tokens in one register, while codes of one token are adjacent, so codes would be read one by one.
    """
    if COMPILED and x.dtype != like.dtype and like.dtype == tl.float16:
        codes = x.to(tl.uint8, bitcast=True)
        return tl.inline_asm_elementwise(_FOUR_WIDER, "=r,=r,r", [codes], dtype=tl.float16, is_pure=False, pack=4)
    else:
        return x.to(like.dtype)
