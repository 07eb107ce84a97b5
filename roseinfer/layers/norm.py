"""Norms over the last dimension."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.availability import has_triton
from roseinfer.quant.base import WeightSource, read_new


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019), with the mean in float32.

    offset: added to the stored weights in float32, which the sum is kept in (Gemma and Qwen3.5 store w for 1 + w).
    """

    def __init__(self, width: int, eps: float, *, offset: float = 0.0) -> None:
        self._shape = (width,)
        self.eps = eps
        self._offset = offset
        self.weight: torch.Tensor
        self.bias = None
        self._fused: Callable[..., torch.Tensor] | None = None

    def load(self, source: WeightSource, name: str) -> None:
        if self._offset:
            self.weight = read_new(source, f"{name}.weight", *self._shape, dtype=torch.float32).add_(self._offset)
        else:
            self.weight = read_new(source, f"{name}.weight", *self._shape)
        if has_triton(source.build.device):
            from roseinfer.kernels.linear.norm import rms_norm

            self._fused = rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(x, self.weight, self.eps)
        if self.weight.dtype is not x.dtype:
            return F.rms_norm(x.to(torch.float32), self._shape, self.weight.to(torch.float32), self.eps).to(x.dtype)
        return F.rms_norm(x, self._shape, self.weight, self.eps)

    def added(self, x: torch.Tensor, residual: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
        """Return residual + multiplier * norm(x) [T, width]; the result may overwrite the residual."""
        if self._fused is not None:
            return self._fused(x, self.weight, self.eps, residual=residual, multiplier=multiplier)
        return residual.add_(self(x), alpha=multiplier)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias. Without `bias` in the checkpoint it is zero."""

    def __init__(self, width: int, eps: float, *, bias: bool = True) -> None:
        self._shape = (width,)
        self.eps = eps
        self._has_bias = bias
        self.weight: torch.Tensor
        self.bias: torch.Tensor
        self._fused: Callable[..., torch.Tensor] | None = None

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = read_new(source, f"{name}.weight", *self._shape)
        self.bias = read_new(source, f"{name}.bias", *self._shape) if self._has_bias else torch.zeros_like(self.weight)
        if has_triton(source.build.device):
            from roseinfer.kernels.linear.norm import layer_norm

            self._fused = layer_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(x, self.weight, self.bias, self.eps)
        return torch.layer_norm(x, self._shape, self.weight, self.bias, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return norm(x + residual) [T, width]; the residual may be overwritten."""
        if self._fused is not None:
            return self._fused(x, self.weight, self.bias, self.eps, summand=residual)
        return self(residual.add_(x))

    def added(self, x: torch.Tensor, residual: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
        """Return residual + multiplier * norm(x) [T, width]; the result may overwrite the residual."""
        return residual.add_(self(x), alpha=multiplier)
