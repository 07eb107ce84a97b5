"""Linear layers, several checkpoint matrices packed into one product."""

import torch

from roseinfer.layers.matmul import Matmul, make_matmul
from roseinfer.layers.weights import WeightSource


class Linear:
    """x [T, in] -> activation(x @ weight.T + bias) (+ residual) [T, sum(outs)].

    `outs` are the widths of the checkpoint's matrices that are stacked here (q, k, v; gate, up; or just one).
    """

    _matmul: Matmul

    def __init__(self, in_features: int, *outs: int, bias: bool = False, activation: str | None = None) -> None:
        self.in_features = in_features
        self.outs = outs
        self._bias = bias
        self._activation = activation

    def load(self, source: WeightSource, *names: str, transposed: bool = False) -> None:
        """One name for each of `outs`, without ".weight". `transposed`: the checkpoint holds [in, out] (Conv1D)."""
        assert len(names) == len(self.outs)
        weight = torch.empty(sum(self.outs), self.in_features, dtype=source.dtype, device=source.device)
        bias = torch.empty(sum(self.outs), dtype=source.dtype, device=source.device) if self._bias else None
        start = 0
        for name, width in zip(names, self.outs, strict=True):
            source.read(f"{name}.weight", weight[start : start + width], transposed=transposed)
            if bias is not None:
                source.read(f"{name}.bias", bias[start : start + width])
            start += width
        self.use(weight, bias)

    def use(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take a weight of [sum(outs), in] that is loaded already, such as tied embeddings."""
        self._matmul = make_matmul(weight, bias, self._activation)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self._matmul(x, residual)
