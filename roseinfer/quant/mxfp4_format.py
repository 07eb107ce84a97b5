"""Experts in MXFP4; all other layers are not quantised."""

from collections.abc import Sequence

import torch

from roseinfer.parallel.group import Share
from roseinfer.quant.base import Epilogue, ExpertNames, Experts, ExpertShape, Matmul, Table, WeightPiece, WeightSource
from roseinfer.quant.plain import PlainFormat


class Mxfp4Format:
    """`WeightFormat` for checkpoints with an `Mxfp4Scheme`. `StackedExperts` widens what is not kept in 4 bits."""

    stored_as: str | None = "mxfp4, widened"

    def __init__(self) -> None:
        self._plain = PlainFormat()

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        return self._plain.load(source, pieces, epilogue)

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        return self._plain.experts(source, shape, share, names)

    def table(self, rows: torch.Tensor) -> Table:
        return self._plain.table(rows)
