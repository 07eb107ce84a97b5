"""Linear layers with weights in int8, rounded while they load, for CPUs."""

from collections.abc import Sequence

import torch

from roseinfer.core.memory import available_memory_bytes
from roseinfer.parallel.group import Share
from roseinfer.quant.base import (
    NO_EPILOGUE,
    Epilogue,
    ExpertNames,
    Experts,
    ExpertShape,
    Matmul,
    WeightPiece,
    WeightSource,
)
from roseinfer.quant.experts import load_sequential_experts
from roseinfer.quant.int8_matmul import Int8Matmul
from roseinfer.quant.int8_product import activation_codes, has_fast_onednn, head_product, layer_product, many_product
from roseinfer.quant.int8_rows import Int8RowsMatmul, runs_natively
from roseinfer.quant.int8_weight import MAX_CODE, Int8Weight
from roseinfer.quant.plain import read_bias
from roseinfer.quant.rotation import Rotation

# Rows of a head to widen and rotate at a time.
_HEAD_ROWS = 4096
# Weights get a second layout, of one byte each, while so many times the memory of all weights so far is still free.
_MIN_FREE_FACTOR = 2


class Int8Format:
    """`WeightFormat` for int8. Any stored weight is read as floats, a piece at a time, and rounded."""

    def __init__(self) -> None:
        self.stored_as: str | None = "int8" if activation_codes() == MAX_CODE else "int8, activations in 7 bits"
        self._memory = _Memory()

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        width = pieces[0].ins.width
        weight = Int8Weight.empty(sum(piece.outs.width for piece in pieces), width)
        rotation = Rotation(width)
        start = 0
        for piece in pieces:
            part = weight.part(slice(start, start + piece.outs.width))
            wide = torch.empty(part.codes.shape, dtype=source.build.dtype)
            source.read(f"{piece.name}.weight", wide, shard=(piece.outs, piece.ins), transposed=piece.transposed)
            part.round(rotation.of_weight(wide.to(torch.float32)))
            start += piece.outs.width
        bias, both = read_bias(source, pieces), self._memory.has_room(weight)
        if runs_natively(weight):
            return Int8RowsMatmul(weight, bias, epilogue, rotation, *many_product(weight, both=both))
        return Int8Matmul(layer_product(weight, both=both), bias, epilogue, rotation)

    def form(self, source: WeightSource, name: str) -> str:
        return name  # each product rotates its own input

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        return load_sequential_experts(self, source, shape, share, names)

    def table(self, rows: torch.Tensor) -> "Int8Table":
        return Int8Table(Int8Weight.of(rows), rows.dtype, self._memory)


class _Memory:
    """Memory of a model's weights, to decide whether there is room for second layouts."""

    def __init__(self) -> None:
        self._taken = 0

    def has_room(self, weight: Int8Weight) -> bool:
        """Count `weight` and return True if there is room for a second layout of it."""
        size = weight.codes.numel()
        both = has_fast_onednn() and available_memory_bytes() > _MIN_FREE_FACTOR * (self._taken + 2 * size)
        self._taken += 2 * size if both else size
        return both


class Int8Table:
    """`Table` in int8. The head has codes of its own: rotated, and in its product's layout."""

    def __init__(self, weight: Int8Weight, dtype: torch.dtype, memory: "_Memory") -> None:
        self._weight = weight
        self._dtype = dtype
        self._memory = memory

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        codes, scales = self._weight.codes.index_select(0, ids), self._weight.scales.index_select(0, ids)
        return Int8Weight(codes, scales).widen(self._dtype)

    def head(self) -> Matmul:
        rows, width = self._weight.codes.shape
        weight, rotation = Int8Weight.empty(rows, width), Rotation(width)
        for start in range(0, rows, _HEAD_ROWS):
            some = slice(start, start + _HEAD_ROWS)
            weight.part(some).round(rotation.of_weight(self._weight.part(some).widen(torch.float32)))
        both = self._memory.has_room(weight)
        if runs_natively(weight):
            return Int8RowsMatmul(weight, None, NO_EPILOGUE, rotation, *many_product(weight, both=both))
        return Int8Matmul(head_product(weight, both=both), None, rotation=rotation)
