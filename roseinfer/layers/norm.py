"""Normalisation over the last dimension."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from roseinfer.kernels.availability import has_triton
from roseinfer.quant.base import WeightSource, read_new


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
            from roseinfer.kernels.norm import rms_norm

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
            from roseinfer.kernels.norm import layer_norm

            self._fused = layer_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(x, self.weight, self.bias, self.eps)
        return F.layer_norm(x, self._shape, self.weight, self.bias, self.eps)
