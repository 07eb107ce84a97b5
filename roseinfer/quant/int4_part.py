"""Matrices in four bits as files hold them, and the sources that give them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from roseinfer.quant.base import WeightPiece, WeightSource
from roseinfer.quant.int4_weight import Int4Weight


@dataclass(frozen=True, slots=True)
class Int4Part:
    """Matrix in four bits. inputs: [K] int64, the input that each column multiplies; None if column i has input i."""

    weight: Int4Weight
    inputs: torch.Tensor | None = None

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix with its columns in the order of inputs: [N, K] of `dtype`, each element rounded once."""
        wide = self.weight.widen(dtype)
        return wide if self.inputs is None else torch.empty_like(wide).index_copy_(1, self.inputs, wide)


@runtime_checkable
class Int4Reader(WeightSource, Protocol):
    """Source that holds matrices in four bits. `read` widens them."""

    def keeps_int4(self, pieces: Sequence[WeightPiece]) -> bool:
        """Return True if all pieces are stored in four bits and can be read as such."""
        ...

    def read_int4(self, piece: WeightPiece) -> Int4Part:
        """Read a piece that is stored in four bits, exactly.

        Raise `UnsupportedModelError` naming an unsuitable tensor.
        """
        ...

    def order_of(self, name: str) -> torch.Tensor | None:
        """Return `Int4Part.inputs` of the whole layer called `name`; None if it is not in four bits."""
        ...
