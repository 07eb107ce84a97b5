"""Feed-forward layers. Both take the residual stream, norm it, and add their result to it."""

import torch

from roseinfer.layers.linear import Linear, NormedLinear
from roseinfer.layers.norm import Norm
from roseinfer.layers.weights import WeightSource


class MLP:
    """x + down(activation(up(norm(x)))), as in GPT-2."""

    def __init__(self, norm: Norm, hidden: int, intermediate: int, activation: str) -> None:
        self._up = NormedLinear(norm, Linear(hidden, intermediate, bias=True, activation=activation))
        self._down = Linear(intermediate, hidden, bias=True)

    def load(self, source: WeightSource, norm: str, up: str, down: str, *, transposed: bool) -> None:
        self._up.load(source, norm, up, transposed=transposed)
        self._down.load(source, down, transposed=transposed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._up(x), x)


class GatedMLP:
    """x + down(activation(gate(norm(x))) * up(norm(x))) (Shazeer, 2020), gate and up in one product."""

    def __init__(self, norm: Norm, hidden: int, intermediate: int, activation: str, *, bias: bool) -> None:
        gate_up = Linear(hidden, intermediate, intermediate, bias=bias, activation=activation, gated=True)
        self._gate_up = NormedLinear(norm, gate_up)
        self._down = Linear(intermediate, hidden, bias=bias)

    def load(self, source: WeightSource, norm: str, prefix: str) -> None:
        self._gate_up.load(source, norm, f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self._down.load(source, f"{prefix}.down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate_up(x), x)
