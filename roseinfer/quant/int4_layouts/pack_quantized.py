"""Layout of compressed-tensors' "pack-quantized": (q - z) * s with signed q and z, both stored with 8 added.

`weight_packed` int32 [N, K / 8], `weight_scale` [N, K / group], `weight_shape` int64 [2], and where they are needed
`weight_zero_point` int32 [N / 8, K / group], packed along N, and `weight_g_idx` int32 [K].
"""

from typing import ClassVar

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.quant.base import WeightPiece, WeightSource
from roseinfer.quant.int4_layouts.nibbles import WORD_COLUMNS, unpacked, words_of
from roseinfer.quant.int4_layouts.stored import groups_of, make_part, read_scales, read_words
from roseinfer.quant.int4_part import Int4Part
from roseinfer.quant.int4_scheme import Int4Groups


class PackQuantizedLayout:
    """`Int4Layout` of compressed-tensors."""

    codes: ClassVar[str] = "weight_packed"
    others: ClassVar[tuple[str, ...]] = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    order: ClassVar[str | None] = "weight_g_idx"

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        return codes[0], codes[1] * WORD_COLUMNS

    def read(
        self, source: WeightSource, piece: WeightPiece, groups: Int4Groups, order: torch.Tensor | None
    ) -> Int4Part:
        name, outs, ins = piece.name, piece.outs, piece.ins
        columns = groups_of(name, ins, groups.size)
        _check_shape(source, f"{name}.weight_shape", [outs.whole, ins.whole])
        device = source.build.device
        words = read_words(source, f"{name}.weight_packed", (outs, words_of(ins)), device=device)
        scales = read_scales(source, f"{name}.weight_scale", (outs, columns))
        zeros = None
        if not groups.symmetric:
            rows = words_of(outs)
            stored = read_words(source, f"{name}.weight_zero_point", (rows, columns), device=device)
            before = outs.start - rows.start * WORD_COLUMNS
            zeros = unpacked(stored.T)[:, before : before + outs.width].T
        return make_part(f"{name}.weight_scale", words.view(torch.uint8), scales, zeros, order)


def _check_shape(source: WeightSource, name: str, wanted: list[int]) -> None:
    shape = torch.empty(2, dtype=torch.int64)
    source.read(name, shape)
    if shape.tolist() != wanted:
        raise UnsupportedModelError(f"tensor {name} holds {shape.tolist()}, config.json says {wanted}")
