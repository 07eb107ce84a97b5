"""Layout of AutoAWQ's version "gemm": (q - z) * s, with eight outputs in a word.

`qweight` int32 [K, N / 8], `qzeros` int32 [K / group, N / 8], `scales` [K / group, N].
"""

from typing import ClassVar

import torch

from roseinfer.parallel.group import Share
from roseinfer.quant.base import WeightPiece, WeightSource
from roseinfer.quant.int4_layouts.nibbles import WORD_COLUMNS, packed_pairs, unpacked, words_of
from roseinfer.quant.int4_layouts.stored import groups_of, make_part, read_scales, read_words
from roseinfer.quant.int4_part import Int4Part
from roseinfer.quant.int4_scheme import Int4Groups

# Place in a word of each of its eight outputs.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


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
        zeros = _codes(source, f"{name}.qzeros", rows, outs)
        scales = read_scales(source, f"{name}.scales", (rows, outs))
        return make_part(f"{name}.scales", packed_pairs(codes), scales.T, zeros, order)


def _codes(source: WeightSource, name: str, rows: Share, outs: Share) -> torch.Tensor:
    """Return codes [outputs, rows] uint8."""
    words = words_of(outs)
    read = read_words(source, name, (rows, words), device=source.build.device)
    codes = unpacked(read).unflatten(1, (-1, WORD_COLUMNS))[:, :, _PLACES].flatten(1)
    before = outs.start - words.start * WORD_COLUMNS
    return codes[:, before : before + outs.width].T.contiguous()
