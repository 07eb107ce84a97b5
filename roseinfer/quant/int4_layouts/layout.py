"""Interface of layouts in checkpoints of safetensors."""

from typing import ClassVar, Protocol

import torch

from roseinfer.quant.base import WeightPiece, WeightSource
from roseinfer.quant.int4_part import Int4Part
from roseinfer.quant.int4_scheme import Int4Groups


class Int4Layout(Protocol):
    """Tensors of one layer, and how they hold its matrix. Their names follow the layer's name and a dot."""

    codes: ClassVar[str]
    """Name of the tensor of codes."""
    others: ClassVar[tuple[str, ...]]
    """Names of the other tensors, which may be missing."""
    order: ClassVar[str | None]
    """Name of the tensor of each input's group; None without one."""

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """Return outputs and inputs of the matrix whose tensor of codes has this shape."""
        ...

    def read(
        self, source: WeightSource, piece: WeightPiece, groups: Int4Groups, order: torch.Tensor | None
    ) -> Int4Part:
        """Read a piece, whose columns are then sorted by `order` as from `read_order`.

        Raise `UnsupportedModelError` naming an unsuitable tensor.
        """
        ...
