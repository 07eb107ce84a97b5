"""Output heads in FP8, of a model whose other weights are in any format."""

from collections.abc import Sequence

import torch

from roseinfer.parallel.group import Share
from roseinfer.quant.base import (
    NO_EPILOGUE,
    Epilogue,
    ExpertNames,
    Experts,
    ExpertShape,
    Matmul,
    Table,
    WeightFormat,
    WeightPiece,
    WeightSource,
)
from roseinfer.quant.fp8_weight import Fp8Weight
from roseinfer.quant.plain import PlainTable, plain_matmul


class Fp8HeadFormat:
    """`WeightFormat` that rounds the output head to FP8, with a scale for each token, and leaves all else to `rest`.

    dtype: the model's. widens: store the rounded head in it, for a device that gains nothing from FP8.
    """

    def __init__(self, rest: WeightFormat, dtype: torch.dtype, *, widens: bool) -> None:
        self._rest = rest
        self._widens = widens
        others = rest.stored_as or str(dtype).removeprefix("torch.")
        self.stored_as = f"{others}, output head in fp8{', widened' if widens else ''}"

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        return self._rest.load(source, pieces, epilogue)

    def form(self, source: WeightSource, name: str) -> str:
        return self._rest.form(source, name)

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        return self._rest.experts(source, shape, share, names)

    def table(self, rows: torch.Tensor) -> Table:
        return Fp8HeadTable(rows, widens=self._widens)


class Fp8HeadTable(PlainTable):
    """`Table` with rows as they are and a head in FP8, which a tied model holds beside them."""

    def __init__(self, rows: torch.Tensor, *, widens: bool) -> None:
        super().__init__(rows)
        self._widens = widens

    def head(self) -> Matmul:
        weight = Fp8Weight.nearest(self._rows)
        if self._widens:
            return plain_matmul(weight.widen(self._rows.dtype), None)
        from roseinfer.kernels.linear.fp8_tiles import Parts  # imports Triton, which only GPUs have
        from roseinfer.quant.fp8_matmul import Fp8Matmul

        return Fp8Matmul(weight, None, NO_EPILOGUE, Parts.allocate(weight.codes.device))
