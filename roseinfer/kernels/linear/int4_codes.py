"""Weights in four bits as kernels read them, and their widening in registers.

The columns are padded to a multiple of 128. Of 128 columns, each of four threads multiplies 32, as the matrix units
want them: thread t has columns 32 * j + 8 * t to 32 * j + 8 * t + 7 for j = 0 to 3. Its codes are 16 adjacent bytes,
one load. Of each eight columns, a word of 32 bits has columns 0, 2, 4, 6, 1, 3, 5, 7 from its low bits on. So two
neighbours lie 16 bits apart, and one instruction takes both to the halves of a register.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.triton_support import tl, triton

BLOCK_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """Matrix scale * (code - 8) + shift [N, columns] in the order of the kernels, or one of `nvfp4_codes`.

    codes: [N, padded / 8] int32, where `padded` is `columns` rounded up to a multiple of 128. scales: int32 [padded /
    group, N], a scale in float16 in the low half, a shift in the high one. group: 32, 64, or a multiple of 128 that
    divides `padded`. factors: only of NVFP4, whose `scales` have four in a word.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    columns: int
    factors: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return len(self.codes), self.columns

    @property
    def padded(self) -> int:
        """Number of columns with those that fill the last block."""
        return self.codes.shape[1] * 8

    @property
    def group(self) -> int:
        """Number of columns that share a word of scales."""
        return self.padded // len(self.scales)


def pack(codes: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor) -> PackedInt4:
    """Return the matrix scale * (code - 8) + shift in the order of the kernels.

    codes: [N, K / 2] uint8, the even column in the low bits; K is even. scales, shifts: [N, K / group] float16.
    """
    rows, columns, packed = len(codes), 2 * codes.shape[1], in_order(codes)
    both = torch.stack((scales, shifts), 2).view(torch.int32)[:, :, 0]
    if scales.shape[1] > 1:
        both = F.pad(both, (0, (8 * packed.shape[1] - columns) * scales.shape[1] // columns))
    return PackedInt4(packed, both.t().reshape(-1).view(-1, rows), columns)  # a single group's strides, too


def in_order(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [N, K / 2] uint8 as `PackedInt4.codes`."""
    rows, missing = len(codes), -2 * codes.shape[1] % BLOCK_COLUMNS
    words = F.pad(codes, (0, missing // 2)).view(rows, -1, 4, 4, 4).transpose(2, 3)  # block, t, j, byte
    low, high = words & 15, words >> 4
    low, high = (half[..., ::2] | half[..., 1::2] << 4 for half in (low, high))
    return torch.cat((low, high), -1).contiguous().view(torch.int32).view(rows, -1)


def _assembly(kind: str, bits: int, one: int, zero: int) -> str:
    """Return the widening of a word ($4) to four pairs of 16 bits, times scales ($5) plus shifts ($7).

    A number with the bits `bits` and a code in its lowest four is `zero` + code. Numbers are subtracted by a product
    with 1, which older GPUs have for bfloat16, too.
    """
    lines = [".reg .b32 one, zero, word, pair;", f"mov.b32 one, {one:#010x};", f"mov.b32 zero, {zero:#010x};"]
    for i in range(4):
        lines.append(f"shr.u32 word, $4, {4 * i};" if i else "mov.b32 word, $4;")
        lines.append(f"lop3.b32 pair, word, 0x000f000f, {bits:#010x}, 0xea;")  # word & mask | bits
        lines.append(f"fma.rn.{kind}x2 pair, pair, one, zero;")
        lines.append(f"fma.rn.{kind}x2 ${i}, pair, $5, $7;")
    return "{\n" + "\n".join(lines) + "\n}"


# 128 + code in bfloat16 minus 136, and 1024 + code in float16 minus 1032
WIDEN_BFLOAT16 = tl.constexpr(_assembly("bf16", 0x43004300, 0x3F803F80, 0xC308C308))
WIDEN_FLOAT16 = tl.constexpr(_assembly("f16", 0x64006400, 0x3C003C00, 0xE408E408))


@triton.jit
def scales_and_shifts(both):
    """Split words into scales and shifts, in float32."""
    scales = both.to(tl.int16).to(tl.float16, bitcast=True)
    shifts = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scales.to(tl.float32), shifts.to(tl.float32)


@triton.jit
def _pairs_of_words(codes, scales, shifts, ASSEMBLY: tl.constexpr):
    """Return columns 0 to 3 and 4 to 7 of words, given as four bytes each, times scales plus shifts, in 16 bits."""
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [codes, scales, shifts],
        dtype=(scales.dtype, scales.dtype),
        is_pure=True,
        pack=4,
    )


@triton.jit
def int4_halves(codes, both, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return columns 0 to 3 and 4 to 7 of the words of `codes` in DTYPE: [N, blocks, t, j, column] each.

    codes: [N, blocks, t, j, byte] uint8. both: words of `PackedInt4.scales`, [N, blocks, J] for J = 4 or 1 groups in
    128 columns. Without COMPILED, for the interpreter, DTYPE may be any.
    """
    scales, shifts = scales_and_shifts(both)
    scales = tl.broadcast_to(scales.to(DTYPE)[:, :, None, :, None], codes.shape)
    shifts = tl.broadcast_to(shifts.to(DTYPE)[:, :, None, :, None], codes.shape)
    if COMPILED:
        ASSEMBLY: tl.constexpr = WIDEN_BFLOAT16 if tl.bfloat16 == DTYPE else WIDEN_FLOAT16
        return _pairs_of_words(codes, scales, shifts, ASSEMBLY)
    else:
        low, high = halves_of_bytes((codes & 15).to(tl.float32) - 8.0, (codes >> 4).to(tl.float32) - 8.0)
        return (low * scales + shifts).to(DTYPE), (high * scales + shifts).to(DTYPE)


@triton.jit
def halves_of_bytes(low, high):
    """Return columns 0 to 3 and 4 to 7 of words [.., column], of the numbers in their bytes' low and high bits.

    Bytes 0 and 1 have the even columns of four each, and bytes 2 and 3 the odd ones.
    """
    N: tl.constexpr = low.shape[0]
    BLOCKS: tl.constexpr = low.shape[1]
    low, high = tl.reshape(low, [N, BLOCKS, 4, 4, 2, 2]), tl.reshape(high, [N, BLOCKS, 4, 4, 2, 2])
    columns = tl.permute(tl.join(low, high), (0, 1, 2, 3, 5, 6, 4))  # half of eight, pair, column of the pair
    low, high = tl.split(tl.permute(columns, (0, 1, 2, 3, 5, 6, 4)))
    return tl.reshape(low, [N, BLOCKS, 4, 4, 4]), tl.reshape(high, [N, BLOCKS, 4, 4, 4])
