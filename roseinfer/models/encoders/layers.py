"""Layers that several encoders share."""

import torch
import torch.nn.functional as F

from roseinfer.quant.base import WeightSource, read_new


class Dense:
    """x @ weight.T + bias of a head, in float32: its few products should not add to the rounding of the network."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        self._shape = (outputs, inputs)
        self._has_bias = bias
        self._weight: torch.Tensor
        self._bias: torch.Tensor | None = None

    def load(self, source: WeightSource, name: str) -> None:
        self._weight = read_new(source, f"{name}.weight", *self._shape, dtype=torch.float32)
        if self._has_bias:
            self._bias = read_new(source, f"{name}.bias", self._shape[0], dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class HeadNorm:
    """LayerNorm of a head, in float32."""

    def __init__(self, width: int, eps: float, *, bias: bool) -> None:
        self._width, self._eps, self._has_bias = width, eps, bias
        self._weight: torch.Tensor
        self._bias: torch.Tensor | None = None

    def load(self, source: WeightSource, name: str) -> None:
        self._weight = read_new(source, f"{name}.weight", self._width, dtype=torch.float32)
        if self._has_bias:
            self._bias = read_new(source, f"{name}.bias", self._width, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self._width,), self._weight, self._bias, self._eps)
