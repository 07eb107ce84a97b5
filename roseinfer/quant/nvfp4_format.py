"""Linear layers and experts that a GPU keeps in NVFP4: as a checkpoint stores them, or rounded while they load."""

from collections.abc import Sequence

import torch

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
from roseinfer.quant.int4_format import MakeProduct
from roseinfer.quant.nvfp4_scheme import GROUP_COLUMNS, Nvfp4Scheme
from roseinfer.quant.nvfp4_stored import Nvfp4Source
from roseinfer.quant.nvfp4_weight import Nvfp4Weight
from roseinfer.quant.plain import PlainFormat, read_bias, read_weight


class Nvfp4Format:
    """`WeightFormat` for checkpoints with an `Nvfp4Scheme`, on a GPU."""

    def __init__(self, stored: Nvfp4Scheme, product: MakeProduct, *, rounds: bool = False) -> None:
        """rounds: round layers that the source holds as floats, except for those that `stored` ignores."""
        self._stored = stored
        self._product = product
        self._rounds = rounds
        self._plain = PlainFormat()

    @property
    def stored_as(self) -> str:
        return self._stored.label

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        weight = self._read(source, pieces)
        if weight is None:
            return self._plain.load(source, pieces, epilogue)
        return self._product(weight, read_bias(source, pieces), epilogue, None)

    def _read(self, source: WeightSource, pieces: Sequence[WeightPiece]) -> Nvfp4Weight | None:
        """Return the pieces stacked in their order; None if one of them has to be read as floats."""
        if isinstance(source, Nvfp4Source) and all(source.has_codes(piece.name) for piece in pieces):
            return Nvfp4Weight.stacked([source.read_nvfp4(piece) for piece in pieces])
        ignored = any(self._stored.ignores(piece.name) for piece in pieces)
        if not self._rounds or ignored or pieces[0].ins.width % GROUP_COLUMNS:
            return None
        return Nvfp4Weight.stacked([Nvfp4Weight.of(read_weight(source, [piece])) for piece in pieces])

    def form(self, source: WeightSource, name: str) -> str:
        kept = isinstance(source, Nvfp4Source) and source.has_codes(name)
        return self._stored.label if kept or (self._rounds and not self._stored.ignores(name)) else FLOATS

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        if not has_triton(source.build.device):
            return self._plain.experts(source, shape, share, names)
        from roseinfer.kernels.experts.tiles import Stack  # imports Triton, which only GPUs have
        from roseinfer.quant.cuda_experts import load_cuda_experts
        from roseinfer.quant.nvfp4_experts import expert_stack, keeps

        def read(pieces: Sequence[WeightPiece]) -> Stack:
            bias = read_bias(source, pieces)
            weight = self._read(source, pieces) if keeps(pieces[0].ins.width) else None
            return Stack(read_weight(source, pieces), None, bias) if weight is None else expert_stack(weight, bias)

        return load_cuda_experts(source, shape, share, names, read)

    def table(self, rows: torch.Tensor) -> Table:
        return self._plain.table(rows)
