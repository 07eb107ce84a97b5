"""Norms, linear layers that pack several checkpoint matrices into one product, and feed-forward layers.

These layers decide which part of a weight a process holds, and what the processes exchange. A layer split by outputs
leaves each rank its own columns of the result. A layer split by inputs takes such columns and adds up all ranks'
partial results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.availability import has_triton
from roseinfer.parallel.group import RankGroup, Share, partial_residual, share_of, sum_partials
from roseinfer.quant.base import Epilogue, Matmul, Norm, Pair, Pairable, WeightPiece, WeightSource, read_new


# --- norms, over the last dimension ---------------------------------------------------------------------------------
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019), with the mean in float32."""

    def __init__(self, width: int, eps: float) -> None:
        self._shape = (width,)
        self.eps = eps
        self.weight: torch.Tensor
        self.bias = None
        self._fused: Callable[..., torch.Tensor] | None = None

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = read_new(source, f"{name}.weight", *self._shape)
        if has_triton(source.build.device):
            from roseinfer.kernels.linear.norm import rms_norm

            self._fused = rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(x, self.weight, self.eps)
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, width: int, eps: float) -> None:
        self._shape = (width,)
        self.eps = eps
        self.weight: torch.Tensor
        self.bias: torch.Tensor
        self._fused: Callable[..., torch.Tensor] | None = None

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = read_new(source, f"{name}.weight", *self._shape)
        self.bias = read_new(source, f"{name}.bias", *self._shape)
        self._fuse(source.build.device)

    def _fuse(self, device: torch.device) -> None:
        if has_triton(device):
            from roseinfer.kernels.linear.norm import layer_norm

            self._fused = layer_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(x, self.weight, self.bias, self.eps)
        return torch.layer_norm(x, self._shape, self.weight, self.bias, self.eps)


# --- linear layers --------------------------------------------------------------------------------------------------
class Split(Enum):
    """The side of a layer's weight that is split among the ranks."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"


@dataclass(frozen=True, slots=True)
class StackedOutput:
    """One of a layer's stacked matrices, `width` outputs wide, which are split into units.

    repeat: ranks beyond the number of units hold the same ones (keys and values of grouped heads).
    """

    width: int
    unit: int = 1
    repeat: bool = False


class Linear:
    """x [T, in] -> activation(x @ weight.T + bias) (+ residual) [T, sum(outs)].

    outs: widths of the checkpoint's matrices that are stacked here (q, k, v; gate, up; or just one). gated: the two
    `outs` are gate and up, and the result is activation(gate) * up [T, sum(outs) / 2]. unit: multiple at which inputs
    may be split. The result may overwrite a residual [T, sum(outs)].
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
    ) -> None:
        self._in = StackedOutput(in_features, unit)
        self._outs = tuple(StackedOutput(out) if isinstance(out, int) else out for out in outs)
        self.split = split
        self._epilogue = Epilogue(activation, gated)
        self._bias = bias
        self._partial_in: RankGroup | None = None  # the group that sums partial results

    def load(self, source: WeightSource, *names: str, transposed: bool = False) -> None:
        """Load the weights. names: one for each of `outs`, or one for all if the checkpoint stacks them; without
        ".weight".

        transposed: the checkpoint stores [in, out] (Conv1D). Raises `ConfigError` for a group that cannot share the
        layer, and otherwise like `WeightSource.read`.
        """
        group = source.build.group
        if self.split is Split.INPUTS and group.size > 1:
            self._partial_in = group
        # Only one rank adds the bias to its partial result.
        here = self._bias and (self.split is Split.OUTPUTS or group.rank == 0)
        if self._bias and not here:
            for name in names:
                source.skip(f"{name}.bias")
        pieces = self._pieces(group, names, transposed, here)
        self.matmul = source.build.weight_format.load(source, pieces, self._epilogue)

    def _pieces(self, group: RankGroup, names: Sequence[str], transposed: bool, bias: bool) -> list[WeightPiece]:
        ins = Share(0, self._in.width, self._in.width)
        if self.split is Split.INPUTS:
            ins = share_of(group, self._in.width, unit=self._in.unit)
            outs = [Share(0, out.width, out.width) for out in self._outs]
        else:
            outs = [share_of(group, out.width, unit=out.unit, repeat=out.repeat) for out in self._outs]
        if len(names) == 1 < len(outs):
            names, outs = _stacked_in_one(names[0], outs)
        return [WeightPiece(name, out, ins, transposed, bias) for name, out in zip(names, outs, strict=True)]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.sum_partials(self.matmul(x, self.partial_residual(residual)), residual)

    def partial_residual(self, residual: torch.Tensor | None) -> torch.Tensor | None:
        """Return the residual that this process's product starts from; None without one."""
        return residual if self._partial_in is None else partial_residual(self._partial_in, residual)

    def sum_partials(self, result: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's result, from this process's product that began with `partial_residual`."""
        return result if self._partial_in is None else sum_partials(self._partial_in, result, residual)


def _stacked_in_one(name: str, outs: list[Share]) -> tuple[list[str], list[Share]]:
    """Return the parts of one checkpoint matrix that stacks all of a layer's matrices, in their order."""
    whole = sum(out.whole for out in outs)
    if all(out.is_all for out in outs):
        return [name], [Share(0, whole, whole)]
    parts, before = [], 0
    for out in outs:
        parts.append(Share(before + out.start, out.width, whole))
        before += out.whole
    return [name] * len(outs), parts


class NormedLinear:
    """linear(norm(x)), the beginning of every transformer block. The linear layer is split by outputs."""

    def __init__(self, norm: Norm, linear: Linear) -> None:
        assert linear.split is Split.OUTPUTS, "nothing adds up partial results here"
        self._norm = norm
        self._linear = linear

    def load(self, source: WeightSource, norm: str, *names: str, transposed: bool = False) -> None:
        self._norm.load(source, norm)
        self._linear.load(source, *names, transposed=transposed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear.matmul.after(self._norm, x)


class _FeedForward:
    """x + down(up(norm(x))), where only `down` reads the result of `up`."""

    def __init__(self, norm: Norm, up: Linear, down: Linear) -> None:
        assert up.split is Split.OUTPUTS, "nothing adds up partial results here"
        self._norm = norm
        self._up = up
        self._down = down
        self._pair: Pair | None = None

    def load(self, source: WeightSource, norm: str, up: Sequence[str], down: str, *, transposed: bool = False) -> None:
        self._norm.load(source, norm)
        self._up.load(source, *up, transposed=transposed)
        self._down.load(source, down, transposed=transposed)
        if isinstance(self._up.matmul, Pairable):
            self._pair = self._up.matmul.paired(self._down.matmul)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        down = self._down
        if self._pair is None:
            return down(self._up.matmul.after(self._norm, x), x)
        return down.sum_partials(self._pair(self._norm, x, down.partial_residual(x)), x)


class MLP:
    """x + down(activation(up(norm(x)))), as in GPT-2. `x`, the residual stream, may be overwritten."""

    def __init__(self, norm: Norm, hidden: int, intermediate: int, activation: str) -> None:
        up = Linear(hidden, intermediate, split=Split.OUTPUTS, bias=True, activation=activation)
        self._layers = _FeedForward(norm, up, Linear(intermediate, hidden, split=Split.INPUTS, bias=True))

    def load(self, source: WeightSource, norm: str, up: str, down: str, *, transposed: bool) -> None:
        self._layers.load(source, norm, [up], down, transposed=transposed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._layers(x)


class GatedMLP:
    """x + down(activation(gate(norm(x))) * up(norm(x))) (Shazeer, 2020), with gate and up in one product.

    `x`, the residual stream, may be overwritten.
    """

    def __init__(self, norm: Norm, hidden: int, intermediate: int, activation: str, *, bias: bool) -> None:
        halves = (intermediate, intermediate)
        gate_up = Linear(hidden, *halves, split=Split.OUTPUTS, bias=bias, activation=activation, gated=True)
        self._layers = _FeedForward(norm, gate_up, Linear(intermediate, hidden, split=Split.INPUTS, bias=bias))

    def load(self, source: WeightSource, norm: str, prefix: str) -> None:
        self._layers.load(source, norm, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], f"{prefix}.down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._layers(x)
