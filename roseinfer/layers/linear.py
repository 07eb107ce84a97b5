"""Linear layers that pack several checkpoint matrices into one product.

These layers decide which part of a weight a process holds, and what the processes exchange. A layer split by outputs
leaves each rank its own columns of the result. A layer split by inputs takes such columns and adds up all ranks'
partial results.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby

import torch

from roseinfer.parallel.group import RankGroup, Share, partial_residual, share_of, sum_partials, sum_whole
from roseinfer.quant.base import Epilogue, LayerAdapting, Matmul, Norm, WeightPiece, WeightSource
from roseinfer.quant.plain import PlainFormat


class Split(Enum):
    """The side of a layer's weight that is split among the ranks."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"


@dataclass(frozen=True, slots=True)
class StackedOutput:
    """One of a layer's stacked matrices, `width` outputs wide, which are split into units.

    repeat: ranks beyond the number of units hold the same ones (keys and values of grouped heads). stripe: (first,
    period) if each of the output's units begins `first` rows after a multiple of `period` in the checkpoint's matrix,
    which holds units of other outputs between them.
    """

    width: int
    unit: int = 1
    repeat: bool = False
    stripe: tuple[int, int] | None = None


class Linear:
    """x [T, in] -> activation(x @ weight.T + bias) (+ residual) [T, sum(outs)].

    outs: widths of the checkpoint's matrices that are stacked here (q, k, v; gate, up; or just one). gated: the two
    `outs` are gate and up, and the result is activation(gate) * up [T, sum(outs) / 2]. unit: multiple at which inputs
    may be split. quantised: False for a small weight that stays in the model's dtype, whatever the format. The result
    may overwrite a residual [T, sum(outs)].
    """

    matmul: Matmul

    def __init__(
        self,
        in_features: int,
        *outs: int | StackedOutput,
        split: Split,
        unit: int = 1,
        bias: bool = False,
        activation: str | None = None,
        gated: bool = False,
        quantised: bool = True,
    ) -> None:
        self._in = StackedOutput(in_features, unit)
        self._outs = tuple(StackedOutput(out) if isinstance(out, int) else out for out in outs)
        self.split = split
        self._epilogue = Epilogue(activation, gated)
        self._bias = bias
        self._quantised = quantised
        self._partial_in: RankGroup | None = None  # the group that sums partial results
        self._adapting: LayerAdapting | None = None

    def load(self, source: WeightSource, *names: str, transposed: bool = False, feeds: str | None = None) -> None:
        """Load the weights. names: one for each of `outs`, or one for all if the checkpoint stacks them; without
        ".weight". Outputs in a row with the same name are stacked in one matrix of the checkpoint.

        transposed: the checkpoint stores [in, out] (Conv1D). feeds: as in `WeightPiece`. Raises `ConfigError` for a
        group that cannot share the layer, and otherwise like `WeightSource.read`.
        """
        group = source.build.group
        if self.split is Split.INPUTS and group.size > 1:
            self._partial_in = group
        # Only one rank adds the bias to its partial result.
        here = self._bias and (self.split is Split.OUTPUTS or group.rank == 0)
        if self._bias and not here:
            for name in names:
                source.skip(f"{name}.bias")
        pieces = [replace(piece, feeds=feeds) for piece in self._pieces(group, names, transposed, here)]
        weights = source.build.weight_format if self._quantised else PlainFormat()
        self.matmul = weights.load(source, pieces, self._epilogue)
        if source.build.adapting is not None and self._quantised:
            self.matmul = source.build.adapting.adapt(self.matmul, pieces, self._epilogue)
            self._adapting = source.build.adapting

    def _pieces(self, group: RankGroup, names: tuple[str, ...], transposed: bool, bias: bool) -> list[WeightPiece]:
        ins = Share(0, self._in.width, self._in.width)
        if self.split is Split.INPUTS:
            ins = share_of(group, self._in.width, unit=self._in.unit)
            outs = [Share(0, out.width, out.width) for out in self._outs]
        else:
            outs = [share_of(group, out.width, unit=out.unit, repeat=out.repeat) for out in self._outs]
        if len(names) == 1:
            names *= len(outs)
        pieces = []
        for name, numbers in groupby(range(len(outs)), key=lambda number: names[number]):
            for rows in _rows_of([(self._outs[number], outs[number]) for number in numbers]):
                pieces.append(WeightPiece(name, rows, ins, transposed, bias))
        return pieces

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self._partial_in is None:
            return self.matmul(x, residual)
        # With adapters, a row's product depends on its place in the step.
        if residual is None or not (self._adapting is None or self._adapting.is_idle):
            return sum_whole(self._partial_in, self.matmul, x, residual)
        return self._partial_in.sum_products(self.matmul, x, residual)

    def partial_residual(self, residual: torch.Tensor | None) -> torch.Tensor | None:
        """Return the residual that this process's product starts from; None without one."""
        return residual if self._partial_in is None else partial_residual(self._partial_in, residual)

    def sum_partials(self, result: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's result, from this process's product that began with `partial_residual`."""
        return result if self._partial_in is None else sum_partials(self._partial_in, result, residual)


def _rows_of(outs: Sequence[tuple[StackedOutput, Share]]) -> list[Share]:
    """Return the rows of one checkpoint matrix that hold these outputs and no others, in their order."""
    if outs[0][0].stripe is not None:
        return [rows for out, share in outs for rows in _stripe_rows(out, share)]
    whole = sum(share.whole for _, share in outs)
    if all(share.is_all for _, share in outs):
        return [Share(0, whole, whole)]
    parts, before = [], 0
    for _, share in outs:
        parts.append(Share(before + share.start, share.width, whole))
        before += share.whole
    return parts


def _stripe_rows(out: StackedOutput, share: Share) -> list[Share]:
    assert out.stripe is not None
    first, period = out.stripe
    units = range(share.start // out.unit, (share.start + share.width) // out.unit)
    whole = share.whole // out.unit * period
    return [Share(unit * period + first, out.unit, whole) for unit in units]


def normed(linear: Linear, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    """Return linear(norm(x)), or linear(x) without a norm. The linear layer is split by outputs."""
    assert linear.split is Split.OUTPUTS, "nothing adds up partial results here"
    return linear.matmul(x) if norm is None else linear.matmul.after(norm, x)
