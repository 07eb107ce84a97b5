"""Embedding tables."""

import torch
import torch.nn.functional as F

from roseinfer.layers.weights import WeightSource

# cuBLAS is several times slower where rows of a result do not begin at aligned addresses: GPT-2's 50,257 logits.
_GPU_ALIGN = 64


class Embedding:
    """ids [T] -> rows [T, width] of a [count, width] table.

    `padded`: the table with rows of zeros behind it, up to a number that a GPU multiplies well; elsewhere the table.
    """

    padded: torch.Tensor

    def __init__(self, count: int, width: int) -> None:
        self._shape = (count, width)

    @property
    def weight(self) -> torch.Tensor:
        return self.padded[: self._shape[0]]

    def load(self, source: WeightSource, name: str) -> None:
        self.padded = padded_rows(*self._shape, source)
        source.read(f"{name}.weight", self.weight)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.padded)


def padded_rows(count: int, width: int, source: WeightSource) -> torch.Tensor:
    """[count or a few more, width], the rows past `count` zero."""
    align = _GPU_ALIGN if source.device.type == "cuda" else 1
    table = torch.empty((-(-count // align) * align, width), dtype=source.dtype, device=source.device)
    table[count:].zero_()
    return table
