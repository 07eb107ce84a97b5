"""NVFP4 in kernels of experts: codes in the order of `mxfp4_codes`, and scales as the upper halves of `nvfp4_codes`.

A word of 16 bits has the scales of a block of 32 columns: of the first 16 in its low bits. So the codes in the low bits
of bytes have the first scale, and the others the second. Numbers are code * scale * 2^-14, before factors of rows.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.experts.code_order import codes_of_words, columns_of, columns_of_pairs
from roseinfer.kernels.linear.fp8_pairs import add_pairs, sum_of_pair
from roseinfer.kernels.linear.nvfp4_codes import (
    NEGATIVE_ZERO,
    scale_numbers,
    scale_pairs,
    tiny_e2m1_numbers,
    widened_pair,
)


def _assembly(kind: str) -> str:
    """Return the widening of a word ($4) to four pairs of 16 bits, times the scales of its block ($5, $6)."""
    lines = [".reg .b32 zero, word, sign, pair;", NEGATIVE_ZERO, "mov.b32 word, $4;"]
    for i in range(4):
        lines += [*widened_pair(i, kind), f"fma.rn.{kind}x2 ${i}, pair, ${5 + i % 2}, zero;"]
    return "{\n" + "\n".join(lines) + "\n}"


_BFLOAT16, _FLOAT16 = tl.constexpr(_assembly("bf16")), tl.constexpr(_assembly("f16"))


def _dots() -> str:
    """Return the sums of a word's ($2) products by four pairs, of each scale's codes."""
    lines = [".reg .b32 word, sign, pair, sum;", "mov.b32 word, $2;"]
    for i in (0, 2, 1, 3):
        lines += widened_pair(i, "f16")
        lines.append(f"mul.rn.f16x2 sum, pair, ${3 + i};" if i < 2 else f"fma.rn.f16x2 ${i - 2}, pair, ${3 + i}, sum;")
    return "{\n" + "\n".join(lines) + "\n}"


_DOTS = tl.constexpr(_dots())


@triton.jit
def _pairs_of_words(words, first, second, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, first, second],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def widened_nvfp4(words, scales, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return the numbers [N, K] in 16 bits of codes in words [N, K / 8] int32, and scales [N, K / 32] int16."""
    scales = scales.to(tl.int32)
    if COMPILED:
        ASSEMBLY: tl.constexpr = _BFLOAT16 if tl.bfloat16 == DTYPE else _FLOAT16
        words = tl.reshape(words, [words.shape[0], scales.shape[1], 4])
        first = tl.broadcast_to(scale_pairs(scales, 0, DTYPE)[:, :, None], words.shape)
        second = tl.broadcast_to(scale_pairs(scales, 1, DTYPE)[:, :, None], words.shape)
        x0, x1, x2, x3 = _pairs_of_words(words, first, second, ASSEMBLY)
        return columns_of_pairs(x0, x1, x2, x3, DTYPE)
    else:
        codes = codes_of_words(words)  # the last dimension is the half of the block
        both = scale_numbers(tl.join(scales, scales >> 8))[:, :, None, None, :]
        return columns_of(
            (tiny_e2m1_numbers(codes) * both).to(DTYPE), (tiny_e2m1_numbers(codes >> 16) * both).to(DTYPE)
        )


@triton.jit
def _dots_of_eight(w, x0, x1, x2, x3):
    """Multiply a word's codes by four pairs: return the pairs of sums of codes with the first and the second scale."""
    return tl.inline_asm_elementwise(
        _DOTS,
        "=&r,=&r,r,r,r,r,r",
        [w, x0, x1, x2, x3],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def multiply_e2m1_blocks(w, scales, x, COMPILED: tl.constexpr):
    """Return the sums over each block of codes * scales * x, times 2^-14, in float32.

    w: words of codes [.., 4]; without COMPILED their bytes. scales: int16. x: of `prepare_blocks` for e2m1.
    """
    x0, x1, x2, x3, largest, _ = x
    if COMPILED:
        of_first, of_second = _dots_of_eight(w, x0, x1, x2, x3)
        of_first = sum_of_pair(tl.reduce(of_first, -1, add_pairs))
        of_second = sum_of_pair(tl.reduce(of_second, -1, add_pairs))
    else:
        codes = w.to(tl.int32)
        of_first = tl.sum(tiny_e2m1_numbers(codes) * x0.to(tl.float32), -1)
        of_second = tl.sum(tiny_e2m1_numbers(codes >> 4) * x1.to(tl.float32), -1)
    scales = scales.to(tl.int32)
    return (of_first * scale_numbers(scales) + of_second * scale_numbers(scales >> 8)) * largest
