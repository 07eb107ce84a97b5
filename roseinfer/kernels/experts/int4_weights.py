"""int4 in kernels of experts: scale * (code - 8) + shift, with codes in the order of `mxfp4_codes`.

A scale and a shift are halves of a word, as in `int4_codes`. Codes are widened to 16 bits for matrix units, or
multiplied as float16 by blocks of 32 columns of one row (`prepare_blocks`), as in `int4_pairs`.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.experts.code_order import codes_of_words, columns_of, columns_of_pairs, pair_of
from roseinfer.kernels.linear.fp8_pairs import add_pairs, neighbours, pack, sum_of_pair
from roseinfer.kernels.linear.int4_codes import WIDEN_BFLOAT16, WIDEN_FLOAT16, scales_and_shifts
from roseinfer.kernels.linear.int4_pairs import dot_of_eight


@triton.jit
def read_scales(scales_ptr, n, k, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the scales and shifts of rows n and of each 32 columns from k on: [rows, BLOCK_K / 32]."""
    UNIT: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    group = tl.minimum((k + tl.arange(0, BLOCK_K // UNIT) * UNIT) // GROUP, K // GROUP - 1)
    both = tl.load(scales_ptr + n.to(tl.int64)[:, None] * (K // GROUP) + group[None, :])
    blocks = tl.broadcast_to(both[:, :, None], [n.shape[0], BLOCK_K // UNIT, UNIT // 32])
    return tl.reshape(blocks, [n.shape[0], BLOCK_K // 32])


@triton.jit
def _pairs_of_words(words, scales, shifts, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [words, scales, scales, shifts],  # shifts are the fourth operand there
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def widened(words, both, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return the numbers [N, K] in 16 bits of codes in words [N, K / 8] int32, and the result [N, K / 32] of
    `read_scales`.
    """
    scales, shifts = scales_and_shifts(both)
    scales, shifts = scales.to(DTYPE), shifts.to(DTYPE)
    if COMPILED:
        ASSEMBLY: tl.constexpr = WIDEN_BFLOAT16 if tl.bfloat16 == DTYPE else WIDEN_FLOAT16
        words = tl.reshape(words, [words.shape[0], both.shape[1], 4])
        scale_pairs = tl.broadcast_to(pair_of(scales)[:, :, None], words.shape)
        shift_pairs = tl.broadcast_to(pair_of(shifts)[:, :, None], words.shape)
        x0, x1, x2, x3 = _pairs_of_words(words, scale_pairs, shift_pairs, ASSEMBLY)
        return columns_of_pairs(x0, x1, x2, x3, DTYPE)
    else:
        codes, scales, shifts = codes_of_words(words), scales[:, :, None, None, None], shifts[:, :, None, None, None]
        low, high = (codes & 15).to(tl.float32) - 8.0, ((codes >> 16) & 15).to(tl.float32) - 8.0
        return columns_of((low * scales + shifts).to(DTYPE), (high * scales + shifts).to(DTYPE))


@triton.jit
def _pairs(eight):
    even, odd = neighbours(eight)
    return pack(even, odd)


@triton.jit
def prepare_blocks(a, b, c, d, E2M1: tl.constexpr, COMPILED: tl.constexpr):
    """Prepare blocks of x for `multiply_blocks`, or for `multiply_e2m1_blocks`.

    a to d: eight columns each, [A, B, C, 8] float32.
    """
    largest = tl.maximum(tl.max(tl.abs(a), 3), tl.max(tl.abs(b), 3))
    largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(c), 3), tl.max(tl.abs(d), 3)))
    largest = tl.maximum(largest, 1e-30)
    sums = tl.sum(a, 3) + tl.sum(b, 3) + tl.sum(c, 3) + tl.sum(d, 3)
    factor = 32768.0 / largest[:, :, :, None]
    if E2M1:
        sixteenth, largest = factor, largest * 0.000030517578125  # 2^-15
    else:
        sixteenth, largest = 0.0625 * factor, largest * 512.0  # of codes 16 times as large; 2^24 / 2^15
    a, b, c, d = a * factor, b * factor, c * sixteenth, d * sixteenth
    if COMPILED:
        x0, x1, x2, x3 = _pairs(a), _pairs(c), _pairs(b), _pairs(d)
    else:
        x0 = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], a.shape[2], 16]).to(tl.float16)
        x1 = tl.reshape(tl.join(c, d), [a.shape[0], a.shape[1], a.shape[2], 16]).to(tl.float16)
        x2, x3 = x0, x1
    return x0, x1, x2, x3, largest, sums


@triton.jit
def multiply_blocks(w, both, x, COMPILED: tl.constexpr):
    """Return the sums over each block of (scale * (code - 8) + shift) * x, float32.

    w: words of codes [.., 4]; without COMPILED their bytes. both: words of scale and shift.
    """
    x0, x1, x2, x3, largest, sums = x
    if COMPILED:
        dots = sum_of_pair(tl.reduce(dot_of_eight(w, x0, x1, x2, x3), -1, add_pairs))
    else:
        low, high = (w & 15).to(tl.float32), (w & 240).to(tl.float32)
        dots = tl.sum(low * x0.to(tl.float32) + high * x1.to(tl.float32), -1) * 5.9604644775390625e-8  # 2^-24
    scales, shifts = scales_and_shifts(both)
    return (dots * largest - 8.0 * sums) * scales + shifts * sums
