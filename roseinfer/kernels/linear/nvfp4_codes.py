"""Weights in NVFP4 as kernels of `PackedInt4` read them, and their widening in registers.

A code is a sign, two bits of an exponent and one of a mantissa (e2m1). At the places of these in a larger format it is
the same number times a power of two, also where the exponent is 0: such codes become subnormal numbers. 16 columns
share a scale in FP8 (e4m3). Its product by a code has at most six significant bits, so bfloat16 and float16 hold it
exactly. A widened number is code * scale * 2^-14.

Scales are kept as the upper half of a float16: without its sign, which is positive, and without its last seven bits,
which are zero. There no scale is a subnormal number, so eight bits also become a bfloat16 by a shift and a sum. A word
has the scales of the four 8 columns that a thread multiplies in 128: of 16 * (2 * j + h) and following, for j = 0 to 3
and h = t // 2.
"""

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.linear.fp8_pairs import add_pairs, sum_of_pair
from roseinfer.kernels.linear.int4_codes import BLOCK_COLUMNS, PackedInt4, halves_of_bytes, in_order

GROUP_COLUMNS = 16


def pack_nvfp4(codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor) -> PackedInt4:
    """Return the matrix code * scale * factor in the order of the kernels, for arguments as of `kernel_parts`."""
    rows, columns = len(codes), 2 * codes.shape[1]
    codes, uppers, factors = kernel_parts(codes, scales, factors)
    uppers = F.pad(uppers, (0, -columns % BLOCK_COLUMNS // GROUP_COLUMNS))
    words = uppers.view(rows, -1, 4, 2).transpose(2, 3).contiguous().view(torch.int32).view(rows, -1)
    return PackedInt4(in_order(codes), words.t().contiguous(), columns, factors)


def kernel_parts(
    codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, the upper halves of scales [N, K / 16] uint8, and factors of widened numbers.

    codes: [N, K / 2] uint8, the even column in the low bits. scales: [N, K / 16] in e4m3, not negative. factors: [N]
    float32.
    """
    # A scale of 0 becomes a small number in bfloat16.
    empty = (scales.to(torch.float32) == 0).repeat_interleave(GROUP_COLUMNS // 2, 1)
    uppers = (scales.to(torch.float16).view(torch.int16) >> 7).to(torch.uint8)
    return codes.masked_fill(empty, 0), uppers, factors * 2.0**14


def widened_pair(number: int, kind: str) -> list[str]:
    """Return instructions that widen the codes in bits 4 * number and following of both halves of `word` to `pair`.

    kind: "bf16" or "f16". They overwrite `sign`.
    """
    mantissa = {"bf16": 7, "f16": 10}[kind]
    up, mask = mantissa - 1 - 4 * number, 7 << mantissa - 1
    return [
        f"shl.b32 sign, word, {12 - 4 * number};",
        "and.b32 sign, sign, 0x80008000;",
        f"shl.b32 pair, word, {up};" if up >= 0 else f"shr.u32 pair, word, {-up};",
        f"lop3.b32 pair, pair, {mask << 16 | mask:#010x}, sign, 0xea;",  # pair & mask | sign
    ]


# Older GPUs have products of bfloat16 only with a sum.
NEGATIVE_ZERO = "mov.b32 zero, 0x80008000;"


def _assembly(kind: str) -> str:
    """Return the widening of a word ($4) to four pairs of 16 bits, times a pair of scales ($5, and again to $8)."""
    lines = [".reg .b32 zero, word, sign, pair;", NEGATIVE_ZERO, "mov.b32 word, $4;"]
    for i in range(4):
        lines += widened_pair(i, kind)
        lines.append(f"fma.rn.{kind}x2 ${i}, pair, $5, zero;")
    return "{\n" + "\n".join(lines) + "\n}"


_BFLOAT16, _FLOAT16 = tl.constexpr(_assembly("bf16")), tl.constexpr(_assembly("f16"))


@triton.jit
def scale_pairs(words, number, DTYPE: tl.constexpr):
    """Return pairs of a scale, the one in byte `number` of words, in float16, or in bfloat16 times 2^112."""
    uppers = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [words, 0x4040 + 0x0101 * number], dtype=tl.int32, is_pure=True, pack=1
    )  # in both halves
    if tl.bfloat16 == DTYPE:
        return uppers * 16 + 0x70007000
    else:
        return uppers * 128


@triton.jit
def scale_numbers(words):
    """Return the scales in the lowest bytes of words, in float32."""
    return ((words & 0xFF) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def tiny_e2m1_numbers(codes):
    """Return the codes in the low four bits, times 2^-14, as float32."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pairs_of_words(codes, scales, DTYPE: tl.constexpr):
    """Return columns 0 to 3 and 4 to 7 of words, given as four bytes each, times pairs of scales, in DTYPE."""
    ASSEMBLY: tl.constexpr = _BFLOAT16 if tl.bfloat16 == DTYPE else _FLOAT16
    KIND: tl.constexpr = tl.bfloat16 if tl.bfloat16 == DTYPE else tl.float16
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, scales], dtype=(KIND.value, KIND.value), is_pure=True, pack=4
    )


@triton.jit
def e2m1_halves(codes, words, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Do as `int4_halves`, for words of scales [N, blocks, 2]. Results are numbers times 2^-14."""
    N: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = codes.shape[1]
    words, j = words[:, :, :, None, None], tl.arange(0, 4)[None, None, None, None, :]
    if COMPILED:
        scales = scale_pairs(words, j, DTYPE)
    else:
        scales = scale_numbers(words >> (8 * j))
    scales = tl.reshape(tl.broadcast_to(scales, [N, BLOCKS, 2, 2, 4]), [N, BLOCKS, 4, 4, 1])
    if COMPILED:
        return pairs_of_words(codes, tl.broadcast_to(scales, codes.shape), DTYPE)
    else:
        low, high = halves_of_bytes(tiny_e2m1_numbers(codes.to(tl.int32)), tiny_e2m1_numbers(codes.to(tl.int32) >> 4))
        return (low * scales).to(DTYPE), (high * scales).to(DTYPE)


def _dot() -> str:
    lines = [".reg .b32 word, sign, pair, sum;", "mov.b32 word, $1;"]
    for i in range(4):
        lines += widened_pair(i, "f16")
        lines.append(f"fma.rn.f16x2 sum, pair, ${3 + i}, sum;" if i else "mul.rn.f16x2 sum, pair, $3;")
    return "{\n" + "\n".join([*lines, "mul.rn.f16x2 $0, sum, $2;"]) + "\n}"


_DOT = tl.constexpr(_dot())


@triton.jit
def _dot_of_eight(w, scales, x0, x1, x2, x3):
    """Multiply a word's eight codes by four pairs, and the sums of its even and of its odd columns by two scales."""
    return tl.inline_asm_elementwise(
        _DOT, "=r,r,r,r,r,r,r", [w, scales, x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _interpreted_dot(w, scales, x0, x1, x2, x3):
    result = tl.zeros([w.shape[0], x0.shape[1], w.shape[2], 4], tl.float32)
    for i in tl.static_range(4):
        x = (x0, x1, x2, x3)[i]
        even, odd = tl.split(tl.permute(tl.reshape(x, [x.shape[0], x.shape[1], 1, 2, 4]), (0, 1, 2, 4, 3)))
        codes = w >> (4 * i)
        result += (tiny_e2m1_numbers(codes) * even + tiny_e2m1_numbers(codes >> 16) * odd) * scales
    return result


@triton.jit
def multiply_e2m1(w, words, x, COMPILED: tl.constexpr):
    """Return the sums over each unit of codes * scales * x, times 2^-14, in float32; as `int4_pairs.multiply`.

    words: of scales [A, 1, N]. x: of `narrow` for e2m1: the products of a unit are at most 43,008 in float16.
    """
    x0, x1, x2, x3, largest, _ = x
    words, j = words[:, :, :, None], tl.arange(0, 4)[None, None, None, :]
    if COMPILED:
        dots = _dot_of_eight(w, scale_pairs(words, j, tl.float16), x0, x1, x2, x3)
        sums = sum_of_pair(tl.reduce(dots, -1, add_pairs))
    else:
        sums = tl.sum(_interpreted_dot(w, scale_numbers(words >> (8 * j)), x0, x1, x2, x3), -1)
    return sums * largest
