"""Layout of GPTQ's tools: (q - z[group of the input]) * s, with eight inputs in a word.

`qweight` int32 [K / 8, N], `qzeros` int32 [K / group, N / 8], `scales` [K / group, N], `g_idx` int32 [K]. Version 1
stores z - 1, version 2 stores z.
"""

from typing import ClassVar

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.quant.base import WeightPiece, WeightSource
from roseinfer.quant.int4_layouts.nibbles import WORD_COLUMNS, unpacked, words_of
from roseinfer.quant.int4_layouts.stored import groups_of, make_part, read_scales, read_words
from roseinfer.quant.int4_part import Int4Part
from roseinfer.quant.int4_scheme import Int4Groups
from roseinfer.quant.int4_weight import DEFAULT_ZERO, MAX_CODE


class GptqLayout:
    """`Int4Layout` of GPTQ."""

    codes: ClassVar[str] = "qweight"
    others: ClassVar[tuple[str, ...]] = ("qzeros", "scales", "g_idx")
    order: ClassVar[str | None] = "g_idx"

    def __init__(self, added_zero: int) -> None:
        """added_zero: what a zero has more than its stored code."""
        self._added = added_zero

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        return codes[1], codes[0] * WORD_COLUMNS

    def read(
        self, source: WeightSource, piece: WeightPiece, groups: Int4Groups, order: torch.Tensor | None
    ) -> Int4Part:
        name, outs, ins = piece.name, piece.outs, piece.ins
        rows = groups_of(name, ins, groups.size)
        words = read_words(source, f"{name}.qweight", (words_of(ins), outs), device=source.build.device)
        codes = words.view(torch.uint8).unflatten(1, (outs.width, -1)).transpose(0, 1).flatten(1)
        zeros = self._zeros(source, piece, groups)
        scales = read_scales(source, f"{name}.scales", (rows, outs))
        return make_part(f"{name}.scales", codes, scales.T, zeros, order)

    def _zeros(self, source: WeightSource, piece: WeightPiece, groups: Int4Groups) -> torch.Tensor | None:
        """Return the zeros [outputs, groups]; None if all are 8."""
        name, outs = f"{piece.name}.qzeros", piece.outs
        words, rows = words_of(outs), groups_of(piece.name, piece.ins, groups.size)
        codes = unpacked(read_words(source, name, (rows, words), device=source.build.device))
        before = outs.start - words.start * WORD_COLUMNS
        stored = codes[:, before : before + outs.width].T
        if groups.symmetric:
            if not bool((stored == DEFAULT_ZERO - self._added).all()):
                raise UnsupportedModelError(f"tensor {name} holds zeros other than {DEFAULT_ZERO}, but sym is true")
            return None
        if self._added and bool((stored == MAX_CODE).any()):
            # Tools store a zero of 0 as -1, which may also have changed its neighbours.
            raise UnsupportedModelError(f"tensor {name} holds a zero of -1 or 16, which version 1 of GPTQ cannot store")
        return stored + self._added
