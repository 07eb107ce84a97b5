"""Decoding of MXFP4 (`mxfp4_codes`) in kernels: to bfloat16 for matrix units, and by way of FP8 to pairs of float16.

A code has the bits of the sign, of two of the exponent, and of one of the mantissa. At the places of these in a larger
format it is the same number times a power of two, also where the exponent is 0: such codes become subnormal numbers.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.experts.code_order import (
    codes_of_words,
    columns_of,
    columns_of_pairs,
    pair_of,
    widened_e2m1,
)
from roseinfer.kernels.linear.fp8_pairs import add_pairs, neighbours, pack, sum_of_pair


@triton.jit
def scale_factors(scales):
    """Return 2^(s - 127) of scales s below 255, in float32."""
    exponent = scales.to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def prepare_codes(a, b, c, d, COMPILED: tl.constexpr):
    """Prepare blocks of x for `multiply_codes`, divided by their largest. a to d: eight columns each, [A, B, C, 8]
    float32.
    """
    largest = tl.maximum(tl.max(tl.abs(a), 3), tl.max(tl.abs(b), 3))
    largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(c), 3), tl.max(tl.abs(d), 3)))
    largest = tl.maximum(largest, 1e-30)
    inverse = (1.0 / largest)[:, :, :, None]
    a, b, c, d = a * inverse, b * inverse, c * inverse, d * inverse
    if COMPILED:
        a0, a1 = neighbours(a)
        b0, b1 = neighbours(b)
        c0, c1 = neighbours(c)
        d0, d1 = neighbours(d)
        return pack(a0, b0), pack(a1, b1), pack(c0, d0), pack(c1, d1), largest * 64.0  # codes are times 2^-6
    else:
        x0 = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], a.shape[2], 16]).to(tl.float16)
        x1 = tl.reshape(tl.join(c, d), [a.shape[0], a.shape[1], a.shape[2], 16]).to(tl.float16)
        return x0, x1, x0, x1, largest


@triton.jit
def _dot_of_eight(w, x0, x1, x2, x3):
    """Multiply a word's eight codes, times 2^-6, by four pairs: return the sums of the halves, as a pair.

    FP8 (e4m3), whose bias is 7 instead of 1, is widened two at a time.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 codes, part, pair, sum;
        .reg .b16 low, high;
        shl.b32 part, $1, 4;
        and.b32 part, part, 0x80808080;
        shl.b32 codes, $1, 2;
        lop3.b32 codes, codes, 0x1C1C1C1C, part, 0xea;
        mov.b32 {low, high}, codes;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mul.rn.f16x2 sum, pair, $2;
        cvt.rn.f16x2.e4m3x2 pair, high;
        fma.rn.f16x2 sum, pair, $3, sum;
        and.b32 part, $1, 0x80808080;
        shr.u32 codes, $1, 2;
        lop3.b32 codes, codes, 0x1C1C1C1C, part, 0xea;
        mov.b32 {low, high}, codes;
        cvt.rn.f16x2.e4m3x2 pair, low;
        fma.rn.f16x2 sum, pair, $4, sum;
        cvt.rn.f16x2.e4m3x2 pair, high;
        fma.rn.f16x2 $0, pair, $5, sum;
        }""",
        "=r,r,r,r,r,r",
        [w, x0, x1, x2, x3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def multiply_codes(w, x, COMPILED: tl.constexpr):
    """Return the sums over each block of codes times x, float32.

    w: words of codes [.., 4]; without COMPILED their bytes. x: of `prepare_codes`.
    """
    if COMPILED:
        return sum_of_pair(tl.reduce(_dot_of_eight(w, x[0], x[1], x[2], x[3]), -1, add_pairs)) * x[4]
    else:
        low, high = _numbers(w), _numbers(w >> 4)
        return tl.sum(low * x[0].to(tl.float32) + high * x[1].to(tl.float32), -1) * x[4]


@triton.jit
def _numbers(codes):
    """Return the codes in the low four bits as float32, by way of float16, whose bias is 15 instead of 1."""
    wide = codes.to(tl.int16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


# Codes at the places of bfloat16's bits are times 2^-126. Their scale is raised by 2^64, so that its place in bfloat16
# fits; the sums of widened numbers are to be multiplied by `SUMS_FACTOR`.
_RAISED_BITS = 64
MAX_WIDENED_SCALE = 254 - _RAISED_BITS
SUMS_FACTOR = tl.constexpr(2.0 ** (126 - _RAISED_BITS))
_FIRST_PAIR = tl.constexpr(_RAISED_BITS << 7 | _RAISED_BITS << 23)


def _assembly(*last: str) -> str:
    """Return the widening of a word ($4) to four pairs of bfloat16, times a pair of factors ($5).

    last: more instructions for `pair`.
    """
    lines = [".reg .b32 word, pair, power;", "mov.b32 word, $4;", "mov.b32 power, 0x7E807E80;"]  # 2^126
    for number in range(4):
        lines += [*widened_e2m1(number), *last, f"mul.rn.bf16x2 ${number}, pair, $5;"]
    return "{\n" + "\n".join(lines) + "\n}"


_WIDENING = tl.constexpr(_assembly())
_EXACT_WIDENING = tl.constexpr(_assembly("mul.rn.bf16x2 pair, pair, power;"))


@triton.jit
def _pairs_of_words(words, factors, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r",
        [words, factors],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def widened(words, scales, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return the numbers [N, K] in 16 bits of codes in words [N, K / 8] int32, and scales [N, K / 32] uint8.

    In bfloat16 they are divided by `SUMS_FACTOR` if COMPILED, for scales up to `MAX_WIDENED_SCALE`. The interpreter,
    which computes no products in bfloat16, is why float16 is possible.
    """
    if COMPILED:
        words = tl.reshape(words, [words.shape[0], scales.shape[1], 4])
        if tl.bfloat16 == DTYPE:
            pairs = tl.broadcast_to((scales.to(tl.int32) * 0x00800080 + _FIRST_PAIR)[:, :, None], words.shape)
            x0, x1, x2, x3 = _pairs_of_words(words, pairs, _WIDENING)
        else:
            factors = scale_factors(scales).to(tl.bfloat16)
            pairs = tl.broadcast_to(pair_of(factors)[:, :, None], words.shape)
            x0, x1, x2, x3 = _pairs_of_words(words, pairs, _EXACT_WIDENING)
        return columns_of_pairs(x0, x1, x2, x3, tl.bfloat16).to(DTYPE)
    else:
        codes, factors = codes_of_words(words), scale_factors(scales)[:, :, None, None, None]
        return columns_of((_numbers(codes) * factors).to(DTYPE), (_numbers(codes >> 16) * factors).to(DTYPE))
