"""Experts in MXFP4; all other layers are not quantised."""

from collections.abc import Sequence

import torch

from roseinfer.kernels.common.availability import has_triton
from roseinfer.parallel.group import Share
from roseinfer.quant.base import Epilogue, ExpertNames, Experts, ExpertShape, Matmul, Table, WeightPiece, WeightSource
from roseinfer.quant.mxfp4 import BLOCKS
from roseinfer.quant.plain import PlainFormat


class Mxfp4Format:
    """`WeightFormat` for checkpoints with an `Mxfp4Scheme`. `StackedExperts` widens what is not kept in 4 bits."""

    def __init__(self, *, widens: bool) -> None:
        """widens: multiply by experts in the model's dtype, for a device that does not keep them in 4 bits."""
        self._widens = widens
        self._plain = PlainFormat()

    @property
    def stored_as(self) -> str:
        return "mxfp4, widened" if self._widens else "mxfp4"

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        return self._plain.load(source, pieces, epilogue)

    def form(self, source: WeightSource, name: str) -> str:
        return name  # experts and other matrices differ

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        drawn = source.stored(f"{names.gate.format(0)}.weight") is None
        packed = names.stacked is not None and source.stored(f"{names.stacked.gate_up}{BLOCKS}") is not None
        if self._widens or not has_triton(source.build.device) or not (drawn or packed):
            return self._plain.experts(source, shape, share, names)
        from roseinfer.quant.mxfp4_experts import load_mxfp4_experts  # imports Triton, which only GPUs have

        return load_mxfp4_experts(source, shape, names)

    def table(self, rows: torch.Tensor) -> Table:
        return self._plain.table(rows)
