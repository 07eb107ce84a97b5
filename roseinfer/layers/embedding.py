"""Embedding tables."""

import torch
import torch.nn.functional as F

from roseinfer.layers.weights import WeightSource, read_new


class Embedding:
    """ids [T] -> rows [T, width] of a [count, width] table."""

    weight: torch.Tensor

    def __init__(self, count: int, width: int) -> None:
        self._shape = (count, width)

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = read_new(source, f"{name}.weight", *self._shape)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)
