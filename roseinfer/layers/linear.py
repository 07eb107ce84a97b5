"""Norms, linear layers with several checkpoint matrices packed into one product, and the feed-forward layers of both.

What a process holds of a layer that several share is decided here, and so is what they exchange: `split` of a layer
says which side of its weight is dealt out. A layer split by outputs leaves each rank its own columns of the result,
one split by inputs takes them and adds up all ranks' partial results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.availability import has_triton
from roseinfer.parallel.group import RankGroup, Share, partial_residual, share_of, sum_partials
from roseinfer.quant.base import Epilogue, Matmul, Norm, Pair, Pairable, Piece, WeightSource, read_new


# --- norms, over the last dimension ---------------------------------------------------------------------------------
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019); the mean is taken in float32."""

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
        if has_triton(source.build.device):
            from roseinfer.kernels.linear.norm import layer_norm

            self._fused = layer_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(x, self.weight, self.bias, self.eps)
        return torch.layer_norm(x, self._shape, self.weight, self.bias, self.eps)


# --- linear layers --------------------------------------------------------------------------------------------------
class Split(Enum):
    """Which side of a layer's weight is dealt out to the ranks."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"


@dataclass(frozen=True, slots=True)
class StackedOutput:
    """One of a layer's stacked matrices, `width` outputs wide, which are dealt out in units.

    repeat: ranks beyond the number of units hold the same ones (keys and values of grouped heads).
    """

    width: int
    unit: int = 1
    repeat: bool = False


class Linear:
    """x [T, in] -> activation(x @ weight.T + bias) (+ residual) [T, sum(outs)].

    `outs` are the checkpoint's matrices that are stacked here (q, k, v; gate, up; or just one), by their widths.
    `gated`: the two `outs` are gate and up, and the result is activation(gate) * up [T, sum(outs) / 2].
    `unit`: where the inputs may be cut. A residual [T, sum(outs)] may be overwritten by the result.
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
        """One name for each of `outs`, or one for all where the checkpoint has them stacked; without ".weight".

        `transposed`: the checkpoint holds [in, out] (Conv1D). Raises `ConfigError` for a group that the layer cannot be
        dealt out to, else like `WeightSource.read`.
        """
        group = source.build.group
        if self.split is Split.INPUTS and group.size > 1:
            self._partial_in = group
        # The bias of partial results is added once.
        here = self._bias and (self.split is Split.OUTPUTS or group.rank == 0)
        if self._bias and not here:
            for name in names:
                source.skip(f"{name}.bias")
        pieces = self._pieces(group, names, transposed, here)
        self.matmul = source.build.weight_format.load(source, pieces, self._epilogue)

    def _pieces(self, group: RankGroup, names: Sequence[str], transposed: bool, bias: bool) -> list[Piece]:
        ins = Share(0, self._in.width, self._in.width)
        if self.split is Split.INPUTS:
            ins = share_of(group, self._in.width, unit=self._in.unit)
            outs = [Share(0, out.width, out.width) for out in self._outs]
        else:
            outs = [share_of(group, out.width, unit=out.unit, repeat=out.repeat) for out in self._outs]
        if len(names) == 1 < len(outs):
            names, outs = _stacked_in_one(names[0], outs)
        return [Piece(name, out, ins, transposed, bias) for name, out in zip(names, outs, strict=True)]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.whole(self.matmul(x, self.start(residual)), residual)

    def start(self, residual: torch.Tensor | None) -> torch.Tensor | None:
        """What this process's product starts from: the residual, or nothing."""
        return residual if self._partial_in is None else partial_residual(self._partial_in, residual)

    def whole(self, result: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The layer's result, of this process's product that began with `start`."""
        return result if self._partial_in is None else sum_partials(self._partial_in, result, residual)


def _stacked_in_one(name: str, outs: list[Share]) -> tuple[list[str], list[Share]]:
    """The parts of one checkpoint matrix that holds all of a layer's, in their order."""
    whole = sum(out.whole for out in outs)
    if all(out.is_all for out in outs):
        return [name], [Share(0, whole, whole)]
    parts, before = [], 0
    for out in outs:
        parts.append(Share(before + out.start, out.width, whole))
        before += out.whole
    return [name] * len(outs), parts


class NormedLinear:
    """linear(norm(x)): how every block of a transformer begins. The linear layer is one split by outputs."""

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
    """x + down(up(norm(x))), of two products that nobody else reads between."""

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
        return down.whole(self._pair(self._norm, x, down.start(x)), x)


class MLP:
    """x + down(activation(up(norm(x)))), as in GPT-2. `x` is the residual stream, which may be overwritten."""

    def __init__(self, norm: Norm, hidden: int, intermediate: int, activation: str) -> None:
        up = Linear(hidden, intermediate, split=Split.OUTPUTS, bias=True, activation=activation)
        self._layers = _FeedForward(norm, up, Linear(intermediate, hidden, split=Split.INPUTS, bias=True))

    def load(self, source: WeightSource, norm: str, up: str, down: str, *, transposed: bool) -> None:
        self._layers.load(source, norm, [up], down, transposed=transposed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._layers(x)


class GatedMLP:
    """x + down(activation(gate(norm(x))) * up(norm(x))) (Shazeer, 2020), gate and up in one product.

    `x` is the residual stream, which may be overwritten.
    """

    def __init__(self, norm: Norm, hidden: int, intermediate: int, activation: str, *, bias: bool) -> None:
        halves = (intermediate, intermediate)
        gate_up = Linear(hidden, *halves, split=Split.OUTPUTS, bias=bias, activation=activation, gated=True)
        self._layers = _FeedForward(norm, gate_up, Linear(intermediate, hidden, split=Split.INPUTS, bias=bias))

    def load(self, source: WeightSource, norm: str, prefix: str) -> None:
        self._layers.load(source, norm, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], f"{prefix}.down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._layers(x)
