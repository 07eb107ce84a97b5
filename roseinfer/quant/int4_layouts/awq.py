"""Layout of AutoAWQ's version "gemm": (q - z) * s, with eight outputs in a word.

`qweight` int32 [K, N / 8], `qzeros` int32 [K / group, N / 8], `scales` [K / group, N].
"""

from typing import ClassVar

import torch

from roseinfer.parallel.group import Share
from roseinfer.quant.base import WeightPiece, WeightSource
from roseinfer.quant.int4_layouts.nibbles import WORD_COLUMNS, unpacked, words_of
from roseinfer.quant.int4_layouts.stored import groups_of, make_part, read_scales, read_words
from roseinfer.quant.int4_part import Int4Part
from roseinfer.quant.int4_scheme import Int4Groups
from roseinfer.quant.int4_weight import MAX_CODE

# Place in a word of each of its eight outputs.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_WORD_BYTES = 4


class AwqLayout:
    """`Int4Layout` of AWQ."""

    codes: ClassVar[str] = "qweight"
    others: ClassVar[tuple[str, ...]] = ("qzeros", "scales")
    order: ClassVar[str | None] = None

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        return codes[1] * WORD_COLUMNS, codes[0]

    def read(
        self, source: WeightSource, piece: WeightPiece, groups: Int4Groups, order: torch.Tensor | None
    ) -> Int4Part:
        name, outs, ins = piece.name, piece.outs, piece.ins
        rows = groups_of(name, ins, groups.size)
        codes = _codes(source, f"{name}.qweight", ins, outs)
        zeros = _zeros(source, f"{name}.qzeros", rows, outs)
        scales = read_scales(source, f"{name}.scales", (rows, outs))
        return make_part(f"{name}.scales", codes, scales.T, zeros, order)


def _codes(source: WeightSource, name: str, ins: Share, outs: Share) -> torch.Tensor:
    """Return codes [outputs, inputs / 2], those of two neighbouring inputs in a byte."""
    words = words_of(outs)
    read = read_words(source, name, (ins, words), device=source.build.device)
    pairs = read.T.contiguous().view(torch.uint8).view(words.width, ins.width // 2, 2, _WORD_BYTES)
    codes = torch.empty(words.width, WORD_COLUMNS, ins.width // 2, dtype=torch.uint8, device=read.device)
    for byte in range(_WORD_BYTES):  # four times faster than an index of places
        even, odd = pairs[:, :, 0, byte], pairs[:, :, 1, byte]
        codes[:, _PLACES.index(2 * byte)] = even & MAX_CODE | odd << 4
        codes[:, _PLACES.index(2 * byte + 1)] = even >> 4 | odd & MAX_CODE << 4
    before = outs.start - words.start * WORD_COLUMNS
    return codes.flatten(0, 1)[before : before + outs.width]


def _zeros(source: WeightSource, name: str, rows: Share, outs: Share) -> torch.Tensor:
    """Return zeros [outputs, groups]."""
    words = words_of(outs)
    read = read_words(source, name, (rows, words), device=source.build.device)
    zeros = unpacked(read).unflatten(1, (-1, WORD_COLUMNS))[:, :, _PLACES].flatten(1)
    before = outs.start - words.start * WORD_COLUMNS
    return zeros[:, before : before + outs.width].T
