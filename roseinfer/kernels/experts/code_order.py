"""Columns of codes of four bits, in the order of `mxfp4_codes`, in kernels that widen them.

A block of 32 columns is four words of 32 bits. From the low bits on, the low half of word t has codes of columns 2t, 2t
+ 16, 2t + 8 and 2t + 24, and the high half those of their neighbours. So one of four threads of the matrix units finds
its columns in one word, and widens neighbours together.
"""

import torch

from roseinfer.kernels.common.triton_support import tl, triton

# Kinds of weights in four bits, by the dtype of their scales.
FOUR_BITS = {torch.uint8: "mxfp4", torch.int32: "int4", torch.int16: "nvfp4"}


@triton.jit
def codes_of_words(words):
    """Return words [N, K / 8] as [N, K / 32, 4, 2, 2], with a pair of codes in the low four bits of their halves.

    The last dimensions are words of a block, pairs 8 columns later, and pairs 16 columns later.
    """
    words = tl.reshape(words, [words.shape[0], words.shape[1] // 4, 4])
    return tl.join(tl.join(words, words >> 8), tl.join(words >> 4, words >> 12))


@triton.jit
def columns_of(low, high):
    """Return [N, K] of the numbers in the low and in the high halves of words, in the order of `codes_of_words`."""
    columns = tl.permute(tl.join(low, high), (0, 1, 4, 3, 2, 5))
    return tl.reshape(columns, [low.shape[0], low.shape[1] * 32])


@triton.jit
def columns_of_pairs(x0, x1, x2, x3, DTYPE: tl.constexpr):
    """Return [N, K] of DTYPE, whose pairs were widened in the order of words' bits: [N, K / 32, 4] int32 each."""
    both = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    low, high = both.to(tl.int16), (both >> 16).to(tl.int16)
    return columns_of(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))


@triton.jit
def pair_of(x):
    """Return numbers in 16 bits as pairs of the same, in int32."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


def widened_e2m1(number: int) -> list[str]:
    """Return instructions that widen the codes (e2m1) in bits 4 * number and following of both halves of `word` to
    `pair`: at the places of bfloat16's bits, where they are times 2^-126.

    A product of integers copies a code to the places of its sign and of its other bits.
    """
    up = 4 * (number % 2)
    return [
        "mov.b32 pair, word;" if number < 2 else "shr.u32 pair, word, 8;",
        f"and.b32 pair, pair, {0x000F000F << up:#010x};",
        f"mul.lo.u32 pair, pair, {(1 << 12 | 1 << 6) >> up:#x};",
        "and.b32 pair, pair, 0x81C081C0;",
    ]
