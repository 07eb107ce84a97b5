"""Linear layers with weights in FP8: as a checkpoint stores them, or rounded while they load."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.common.availability import has_triton
from roseinfer.parallel.group import Share
from roseinfer.quant.base import (
    FLOATS,
    Epilogue,
    ExpertNames,
    Experts,
    ExpertShape,
    Matmul,
    Table,
    WeightPiece,
    WeightSource,
)
from roseinfer.quant.experts import load_sequential_experts
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.fp8_stored import is_fp8, new_weight, part_of, read_codes
from roseinfer.quant.fp8_weight import Fp8Weight
from roseinfer.quant.plain import PlainFormat, plain_matmul, read_bias, read_weight

if TYPE_CHECKING:  # needs Triton
    from roseinfer.kernels.experts.tiles import Stack
    from roseinfer.kernels.linear.fp8_tiles import Parts

# Weights that are rounded at a time.
_MAX_BATCH_ELEMENTS = 1 << 26


class Fp8Format:
    """`WeightFormat` for FP8. Layers that stay in 16 bits are not quantised at all."""

    def __init__(self, stored: Fp8Scheme | None, *, rounds: bool, widens: bool) -> None:
        """stored: the checkpoint's FP8 scheme, if it has one.

        rounds: round layers that the checkpoint stores as floats to FP8, except for those that `stored` ignores. They
        get a scale for each channel, or for each block where `stored` has blocks. widens: store rounded weights in the
        model's dtype and multiply by them so, for a device that gains nothing from FP8.
        """
        self._stored = stored
        self._rounds = rounds
        self._widens = widens
        self._scheme = stored or Fp8Scheme("channel")
        self._plain = PlainFormat()
        self._parts: Parts | None = None

    @property
    def stored_as(self) -> str:
        return f"{self._scheme.label}, widened" if self._widens else self._scheme.label

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        weight = self.read(source, pieces)
        if weight is None:
            return self._plain.load(source, pieces, epilogue)
        bias = read_bias(source, pieces)
        if self._widens:
            wide = weight.widen(source.build.dtype)
            source.finite.add_widened(f"{pieces[0].name}.weight", wide)
            return plain_matmul(wide, bias, epilogue)
        return self._product(weight, bias, epilogue)

    def read(self, source: WeightSource, pieces: Sequence[WeightPiece]) -> Fp8Weight | None:
        """Read the matrices of `pieces`, stacked in their order; None if they are not to be in FP8."""
        coded, rounded = self._is_coded(source, pieces), self._is_rounded(pieces)
        if not coded and not rounded:
            return None
        weight = new_weight(pieces, source.build.device, block=self._scheme.layout == "block")
        if coded:
            read_codes(source, self._scheme, pieces, weight)
        else:
            _round(source, pieces, weight)
        return weight

    def _product(self, weight: Fp8Weight, bias: torch.Tensor | None, epilogue: Epilogue) -> Matmul:
        from roseinfer.kernels.linear.fp8_tiles import Parts  # imports Triton, which only GPUs have
        from roseinfer.quant.fp8_matmul import Fp8Matmul

        if self._parts is None:
            self._parts = Parts.allocate(weight.codes.device)
        return Fp8Matmul(weight, bias, epilogue, self._parts)

    def form(self, source: WeightSource, name: str) -> str:
        stored = self._stored
        rounded = self._rounds and (stored is None or not stored.ignores(name))
        return "fp8" if rounded or is_fp8(source, f"{name}.weight") else FLOATS

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        if has_triton(source.build.device):
            from roseinfer.quant.cuda_experts import load_cuda_experts  # imports Triton, which only GPUs have

            return load_cuda_experts(source, shape, share, names, partial(self._stack, source))
        return load_sequential_experts(self, source, shape, share, names)

    def _stack(self, source: WeightSource, pieces: Sequence[WeightPiece]) -> "Stack":
        """Read the matrices of `pieces`, stacked in their order, their scales if they are in FP8, and their biases."""
        from roseinfer.kernels.experts.tiles import Stack

        weight, bias = self.read(source, pieces), read_bias(source, pieces)
        if weight is None:
            return Stack(read_weight(source, pieces), None, bias)
        assert not self._widens, "a GPU that multiplies by widened weights, in float32, runs no experts"
        return Stack(weight.codes, weight.scales, bias)

    def table(self, rows: torch.Tensor) -> Table:
        return self._plain.table(rows)

    def _is_coded(self, source: WeightSource, pieces: Sequence[WeightPiece]) -> bool:
        """Return True if the checkpoint stores the layer in FP8."""
        coded = _same([is_fp8(source, f"{piece.name}.weight") for piece in pieces], pieces)
        if coded and self._stored is None:
            raise UnsupportedModelError(f"tensor {pieces[0].name}.weight is in FP8, but config.json does not say so")
        return coded

    def _is_rounded(self, pieces: Sequence[WeightPiece]) -> bool:
        """Return True if the layer is to be rounded in case it is stored as floats."""
        stored = self._stored
        return self._rounds and _same([stored is None or not stored.ignores(piece.name) for piece in pieces], pieces)


def _same(answers: list[bool], pieces: Sequence[WeightPiece]) -> bool:
    """Return the answer that holds for all pieces of a layer. Raises `UnsupportedModelError` if they differ."""
    if any(answers) and not all(answers):
        names = ", ".join([piece.name for piece in pieces[:4]] + ["..."] * (len(pieces) > 4))
        raise UnsupportedModelError(f"{names}: one product of differently quantised parts is not supported")
    return answers[0]


def _round(source: WeightSource, pieces: Sequence[WeightPiece], into: Fp8Weight) -> None:
    """Fill `into` with the rounded pieces.

    A layer of experts has many small pieces; they are rounded in batches large enough to keep a GPU busy.
    """
    start = 0
    for batch in _batches(pieces):
        rows = slice(start, start + sum(piece.outs.width for piece in batch))
        part = part_of(into, rows)
        wide = read_weight(source, batch)
        # Random weights are not worth a search for the best scale.
        drawn = source.stored(f"{batch[0].name}.weight") is None
        rounded = Fp8Weight.of(wide, block=into.is_block) if drawn or into.is_block else Fp8Weight.nearest(wide)
        part.codes.copy_(rounded.codes)
        part.scales.copy_(rounded.scales)
        start = rows.stop


def _batches(pieces: Sequence[WeightPiece]) -> Iterator[list[WeightPiece]]:
    """Split the pieces, in their order, into lists of up to `_MAX_BATCH_ELEMENTS` weights, or of one piece."""
    batch: list[WeightPiece] = []
    weights = 0
    for piece in pieces:
        size = piece.outs.width * piece.ins.width
        if batch and weights + size > _MAX_BATCH_ELEMENTS:
            yield batch
            batch, weights = [], 0
        batch.append(piece)
        weights += size
    yield batch
