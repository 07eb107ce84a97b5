"""Checkpoints that store the matrices of layers in several tensors, read as if each were one matrix of floats."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from roseinfer.parallel.group import Share
from roseinfer.quant.base import TensorMetadata, WeightPiece, WeightSource

WEIGHT = ".weight"


class PackedSource(ABC):
    """Source in which the matrix of a layer X that is stored in codes is called X.weight, and is widened by `read`."""

    def __init__(self, inner: WeightSource, codes: str, others: Sequence[str], dtype: str) -> None:
        """codes, others: ends of the names of a layer's tensors, after a dot; the others may be missing. dtype: name of
        the dtype of such matrices; safetensors has none.
        """
        self._inner = inner
        self._codes, self._others, self._dtype = codes, others, dtype
        self.build, self.finite = inner.build, inner.finite

    @abstractmethod
    def widened(self, piece: WeightPiece, dtype: torch.dtype) -> torch.Tensor:
        """Return a piece that is stored in codes: [its outputs, its inputs] of `dtype`."""

    @abstractmethod
    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """Return outputs and inputs of the matrix whose tensor of codes has this shape."""

    def __contains__(self, name: str) -> bool:
        return name in self._inner or self.layer_of(name) is not None

    def stored(self, name: str) -> TensorMetadata | None:
        layer = self.layer_of(name)
        if layer is None:
            return self._inner.stored(name)
        codes = self._inner.stored(f"{layer}.{self._codes}")
        assert codes is not None
        return TensorMetadata(self._dtype, self.shape(codes.shape) if len(codes.shape) == 2 else ())

    def skip(self, name: str) -> None:
        layer = self.layer_of(name)
        if layer is None:
            self._inner.skip(name)
            return
        for part in (self._codes, *self._others):
            if f"{layer}.{part}" in self._inner:
                self._inner.skip(f"{layer}.{part}")

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        layer = self.layer_of(name)
        if layer is None or into.ndim != 2:
            self._inner.read(name, into, shard=shard, transposed=transposed)
            return
        outs, ins = shard or (Share(0, width, width) for width in into.shape)
        into.copy_(self.widened(WeightPiece(layer, outs, ins), into.dtype))
        self.finite.add_widened(name, into)

    def layer_of(self, name: str) -> str | None:
        """Return the layer whose matrix is called `name` and stored in codes; None for other tensors."""
        if not name.endswith(WEIGHT):
            return None
        layer = name.removesuffix(WEIGHT)
        return layer if self.has_codes(layer) else None

    def has_codes(self, layer: str) -> bool:
        return f"{layer}.{self._codes}" in self._inner
