"""Feed-forward layers. Both add their result to the residual stream."""

import torch

from roseinfer.layers.linear import Linear
from roseinfer.layers.matmul import activate
from roseinfer.layers.weights import WeightSource


class MLP:
    """residual + down(activation(up(x))), as in GPT-2."""

    def __init__(self, hidden: int, intermediate: int, activation: str) -> None:
        self._up = Linear(hidden, intermediate, bias=True, activation=activation)
        self._down = Linear(intermediate, hidden, bias=True)

    def load(self, source: WeightSource, up: str, down: str, *, transposed: bool) -> None:
        self._up.load(source, up, transposed=transposed)
        self._down.load(source, down, transposed=transposed)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._down(self._up(x), residual)


class GatedMLP:
    """residual + down(activation(gate(x)) * up(x)) (Shazeer, 2020), gate and up in one product."""

    def __init__(self, hidden: int, intermediate: int, activation: str, *, bias: bool) -> None:
        self._activation = activation
        self._intermediate = intermediate
        self._gate_up = Linear(hidden, intermediate, intermediate, bias=bias)
        self._down = Linear(intermediate, hidden, bias=bias)

    def load(self, source: WeightSource, prefix: str) -> None:
        self._gate_up.load(source, f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self._down.load(source, f"{prefix}.down_proj")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up(x)
        gate, up = gate_up[:, : self._intermediate], gate_up[:, self._intermediate :]
        return self._down(activate(gate, self._activation).mul_(up), residual)
