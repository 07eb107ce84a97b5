"""Decoding of MXFP4 (`mxfp4_codes`) in kernels: to bfloat16 for matrix units, and to FP8 for `fp8_pairs`.

A code has the bits of the sign, of two of the exponent, and of one of the mantissa. At the places of these in a larger
format it is the same number times a power of two, also where the exponent is 0: such codes become subnormal numbers.
"""

from roseinfer.kernels.common.triton_support import tl, triton


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
    """Return codes [..] of uint8 as float32, by way of float16, whose bias is 15 instead of 1."""
    wide = codes.to(tl.int16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _pairs_of_bytes(codes, factors):
    """Return the codes in the low and in the high bits of bytes, times `factors`, all bfloat16.

    The bits of a byte are copied to both bytes of a number of 16 bits, so that a shift moves sign or magnitude to their
    places. The product by 2^126 then corrects the exponent's bias.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 bytes, sign, number, power;
        mov.b32 power, 0x7E807E80;
        prmt.b32 bytes, $4, 0, 0x1100;
        shl.b32 sign, bytes, 4;
        and.b32 sign, sign, 0x80008000;
        shl.b32 number, bytes, 6;
        and.b32 number, number, 0x01C001C0;
        or.b32 number, number, sign;
        mul.rn.bf16x2 number, number, power;
        mul.rn.bf16x2 $0, number, $5;
        and.b32 sign, bytes, 0x80008000;
        shl.b32 number, bytes, 2;
        and.b32 number, number, 0x01C001C0;
        or.b32 number, number, sign;
        mul.rn.bf16x2 number, number, power;
        mul.rn.bf16x2 $2, number, $5;
        prmt.b32 bytes, $4, 0, 0x3322;
        shl.b32 sign, bytes, 4;
        and.b32 sign, sign, 0x80008000;
        shl.b32 number, bytes, 6;
        and.b32 number, number, 0x01C001C0;
        or.b32 number, number, sign;
        mul.rn.bf16x2 number, number, power;
        mul.rn.bf16x2 $1, number, $6;
        and.b32 sign, bytes, 0x80008000;
        shl.b32 number, bytes, 2;
        and.b32 number, number, 0x01C001C0;
        or.b32 number, number, sign;
        mul.rn.bf16x2 number, number, power;
        mul.rn.bf16x2 $3, number, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [codes, factors],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def widened(codes, scales, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return the numbers [N, K] in 16 bits of codes [N, K / 2] and scales [N, K / 32], both uint8.

    The interpreter, which computes no products in bfloat16, is why float16 is possible.
    """
    N: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1]
    factors = scale_factors(scales)[:, :, None]
    codes = tl.reshape(codes, [N, BLOCKS, 16])
    if COMPILED and tl.bfloat16 == DTYPE:
        low, high = _pairs_of_bytes(codes, tl.broadcast_to(factors.to(tl.bfloat16), [N, BLOCKS, 16]))
    else:
        low, high = (_numbers(codes) * factors).to(DTYPE), (_numbers(codes >> 4) * factors).to(DTYPE)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), [N, BLOCKS * 32])
