"""Linear layers, several checkpoint matrices packed into one product."""

import torch

from roseinfer.layers.matmul import Epilogue, Matmul, make_matmul
from roseinfer.layers.norm import Norm
from roseinfer.layers.weights import WeightSource


class Linear:
    """x [T, in] -> activation(x @ weight.T + bias) (+ residual) [T, sum(outs)].

    `outs` are the widths of the checkpoint's matrices that are stacked here (q, k, v; gate, up; or just one).
    `gated`: the two `outs` are gate and up, and the result is activation(gate) * up [T, sum(outs) / 2].
    A residual [T, sum(outs)] may be overwritten by the result.
    """

    matmul: Matmul

    def __init__(
        self, in_features: int, *outs: int, bias: bool = False, activation: str | None = None, gated: bool = False
    ) -> None:
        self.in_features = in_features
        self.outs = outs
        self.epilogue = Epilogue(activation, gated)
        self._bias = bias

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
        self.matmul = make_matmul(weight, bias, self.epilogue)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.matmul(x, residual)


class NormedLinear:
    """linear(norm(x)): how every block of a transformer begins."""

    def __init__(self, norm: Norm, linear: Linear) -> None:
        self._norm = norm
        self._linear = linear

    def load(self, source: WeightSource, norm: str, *names: str, transposed: bool = False) -> None:
        self._norm.load(source, norm)
        self._linear.load(source, *names, transposed=transposed)

    def use(self, source: WeightSource, norm: str, weight: torch.Tensor) -> None:
        """Load the norm alone and take a weight that is loaded already."""
        self._norm.load(source, norm)
        self._linear.use(weight)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`out`: where the result goes, if given."""
        return self._linear.matmul.after(self._norm, x, out)
