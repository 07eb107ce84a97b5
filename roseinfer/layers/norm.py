"""Normalisation over the last dimension."""

import torch
import torch.nn.functional as F

from roseinfer.layers.weights import WeightSource, read_new


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019); the mean is taken in float32."""

    _weight: torch.Tensor

    def __init__(self, width: int, eps: float) -> None:
        self._shape = (width,)
        self._eps = eps

    def load(self, source: WeightSource, name: str) -> None:
        self._weight = read_new(source, f"{name}.weight", *self._shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)


class HeadNorm:
    """RMSNorm of every query and key head, in one go: x [T, heads + kv_heads, D], the query heads first.

    Queries share one weight [D] and keys another, so the weight here is [heads + kv_heads, D].
    """

    _weight: torch.Tensor

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        self._heads = heads
        self._kv_heads = kv_heads
        self._shape = (head_dim,)
        self._eps = eps

    def load(self, source: WeightSource, query_name: str, key_name: str) -> None:
        query = read_new(source, f"{query_name}.weight", *self._shape)
        key = read_new(source, f"{key_name}.weight", *self._shape)
        self._weight = torch.cat((query.expand(self._heads, -1), key.expand(self._kv_heads, -1)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, None, self._eps) * self._weight


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    _weight: torch.Tensor
    _bias: torch.Tensor

    def __init__(self, width: int, eps: float) -> None:
        self._shape = (width,)
        self._eps = eps

    def load(self, source: WeightSource, name: str) -> None:
        self._weight = read_new(source, f"{name}.weight", *self._shape)
        self._bias = read_new(source, f"{name}.bias", *self._shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)
