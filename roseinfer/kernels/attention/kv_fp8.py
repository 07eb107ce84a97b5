"""What the kernels do with K and V that are kept in FP8 (e4m3fn): narrow them on their way in, widen them in registers.

Queries and the weights of the softmax are float16 beside them, not bfloat16: a GPU has an instruction that makes two
float16 of two codes, exactly, and float16 holds what is multiplied by them more closely than bfloat16 does.
"""

from roseinfer.kernels.common.fp8_codes import KERNEL_MAX_CODE
from roseinfer.kernels.common.triton_support import tl, triton

# Four codes to four float16, two instructions. As it is not called pure, it stays where it is written.
_FOUR_WIDER: tl.constexpr = tl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def narrowed(x, scale):
    """The codes of x, float32: of x / scale as far as codes reach. What is not a number stays so."""
    codes = tl.clamp(x / scale, -KERNEL_MAX_CODE, KERNEL_MAX_CODE, propagate_nan=tl.PropagateNan.ALL)
    return codes.to(tl.float8e4nv)


@triton.jit
def narrow_queries(queries):
    """Queries as they are multiplied by codes, and what the scores are to be multiplied by then.

    bfloat16 ones become float16, divided by the power of two below the largest, so that any number fits.
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
    """Values as the keys that came before them, exactly. COMPILED: not interpreted, which knows no assembly.

    Left to itself, the compiler lays codes out for the matrix units and then widens them. These want values of
    neighbouring tokens in one register, and codes of one token lie side by side: they would be read one by one.
    """
    if COMPILED and x.dtype != like.dtype and like.dtype == tl.float16:
        codes = x.to(tl.uint8, bitcast=True)
        return tl.inline_asm_elementwise(_FOUR_WIDER, "=r,=r,r", [codes], dtype=tl.float16, is_pure=False, pack=4)
    else:
        return x.to(like.dtype)
