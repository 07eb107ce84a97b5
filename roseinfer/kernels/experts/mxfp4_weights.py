"""Decoding of MXFP4 (`mxfp4_codes`) in kernels: to bfloat16 for matrix units, and to FP8 for `fp8_pairs`.

A code has the bits of the sign, of two of the exponent, and of one of the mantissa. At the places of these in a larger
format it is the same number times a power of two, also where the exponent is 0: such codes become subnormal numbers.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.experts.code_order import codes_of_words, columns_of, columns_of_pairs, pair_of


@triton.jit
def scale_factors(scales):
    """Return 2^(s - 127) of scales s below 255, in float32."""
    exponent = scales.to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fp8_factors(scales):
    """Return the factors of codes from `fp8_codes`: the bias of FP8 (e4m3) is 7 instead of 1."""
    return scale_factors(scales) * 64.0


@triton.jit
def fp8_codes(w, COMPILED: tl.constexpr):
    """Return the codes in the low and in the high bits of bytes as FP8 (four in an int32 if COMPILED)."""
    if COMPILED:
        low = ((w << 4) & -0x7F7F7F80) | ((w << 2) & 0x1C1C1C1C)
        high = (w & -0x7F7F7F80) | ((w >> 2) & 0x1C1C1C1C)
        return low, high
    else:
        low = ((w & 8) << 4) | ((w & 7) << 2)
        high = (w & 128) | ((w & 112) >> 2)
        return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _numbers(codes):
    """Return the codes in the low four bits as float32, by way of float16, whose bias is 15 instead of 1."""
    wide = codes.to(tl.int16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


def _assembly() -> str:
    """Return the widening of a word ($4) to four pairs of bfloat16, times a pair of factors ($5).

    The codes of a pair are 16 bits apart. The product by 2^126 corrects the exponent's bias.
    """
    lines = [".reg .b32 power, sign, pair;", "mov.b32 power, 0x7E807E80;"]
    for number in range(4):
        up = 6 - 4 * number
        lines.append(f"shl.b32 sign, $4, {12 - 4 * number};")
        lines.append("and.b32 sign, sign, 0x80008000;")
        lines.append(f"shl.b32 pair, $4, {up};" if up > 0 else f"shr.u32 pair, $4, {-up};")
        lines.append("lop3.b32 pair, pair, 0x01C001C0, sign, 0xea;")  # pair & mask | sign
        lines.append("mul.rn.bf16x2 pair, pair, power;")
        lines.append(f"mul.rn.bf16x2 ${number}, pair, $5;")
    return "{\n" + "\n".join(lines) + "\n}"


_ASSEMBLY = tl.constexpr(_assembly())


@triton.jit
def _pairs_of_words(words, factors):
    return tl.inline_asm_elementwise(
        _ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r",
        [words, factors],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def widened(words, scales, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return the numbers [N, K] in 16 bits of codes in words [N, K / 8] int32, and scales [N, K / 32] uint8.

    The interpreter, which computes no products in bfloat16, is why float16 is possible.
    """
    factors = scale_factors(scales)
    if COMPILED:
        words = tl.reshape(words, [words.shape[0], scales.shape[1], 4])
        pairs = tl.broadcast_to(pair_of(factors.to(tl.bfloat16))[:, :, None], words.shape)
        x0, x1, x2, x3 = _pairs_of_words(words, pairs)
        return columns_of_pairs(x0, x1, x2, x3, tl.bfloat16).to(DTYPE)
    else:
        codes, factors = codes_of_words(words), factors[:, :, None, None, None]
        return columns_of((_numbers(codes) * factors).to(DTYPE), (_numbers(codes >> 16) * factors).to(DTYPE))
