"""Weights that a checkpoint stores in four bits: read as they are, or widened for readers that expect floats."""

from collections.abc import Sequence

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.parallel.group import Share
from roseinfer.quant.base import WeightPiece, WeightSource
from roseinfer.quant.int4_layouts.awq import AwqLayout
from roseinfer.quant.int4_layouts.gptq import GptqLayout
from roseinfer.quant.int4_layouts.layout import Int4Layout
from roseinfer.quant.int4_layouts.pack_quantized import PackQuantizedLayout
from roseinfer.quant.int4_layouts.stored import read_order
from roseinfer.quant.int4_part import Int4Part, Int4Reader
from roseinfer.quant.int4_scheme import Int4Scheme
from roseinfer.quant.int4_weight import Int4Weight
from roseinfer.quant.packed_source import WEIGHT, PackedSource

_LAYOUTS: dict[str, Int4Layout] = {
    "awq": AwqLayout(),
    "gptq": GptqLayout(added_zero=1),
    "gptq_v2": GptqLayout(added_zero=0),
    "pack-quantized": PackQuantizedLayout(),
}
_CODES = "U4"
_BIAS = ".bias"


class Int4Source(PackedSource):
    """`Int4Reader` of a checkpoint of safetensors. Columns of a matrix are read in the order of inputs."""

    def __init__(self, inner: WeightSource, scheme: Int4Scheme) -> None:
        self._scheme = scheme
        self._layout = layout = _LAYOUTS[scheme.layout]
        self._biased: set[str] = set()  # layers whose biases were read
        self._layers: set[str] = set()  # layers that were read
        super().__init__(inner, layout.codes, layout.others, _CODES)

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        return self._layout.shape(codes)

    def widened(self, piece: WeightPiece, dtype: torch.dtype) -> torch.Tensor:
        return self.read_int4(piece).widen(dtype)

    def skip(self, name: str) -> None:
        self._biased.add(name.removesuffix(_BIAS))
        super().skip(name)

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        self._biased.add(name.removesuffix(_BIAS))
        super().read(name, into, shard=shard, transposed=transposed)

    def keeps_int4(self, pieces: Sequence[WeightPiece]) -> bool:
        return all(self.has_codes(piece.name) for piece in pieces)

    def read_int4(self, piece: WeightPiece) -> Int4Part:
        self._layers.add(piece.name)
        order = self._read_order(piece.name, piece.ins)
        return self._layout.read(self._inner, piece, self._scheme.groups_of(piece.name), order)

    def order_of(self, name: str) -> torch.Tensor | None:
        held = self.stored(f"{name}{WEIGHT}") if self.has_codes(name) else None
        if held is None or not held.shape:
            return None
        return self._read_order(name, Share(0, held.shape[1], held.shape[1]))

    def _read_order(self, layer: str, ins: Share) -> torch.Tensor | None:
        order = self._layout.order
        if order is None:
            return None
        return read_order(self._inner, f"{layer}.{order}", ins, self._scheme.groups_of(layer).size)

    def skip_zero_biases(self) -> None:
        """Mark the biases of layers that have none in the model as read if they are zeros, as some tools add them.

        Raise `UnsupportedModelError` naming one that is not.
        """
        for layer in sorted(self._layers - self._biased):
            held = self._inner.stored(f"{layer}{_BIAS}")
            if held is None:
                continue
            bias = torch.empty(held.shape)
            self._inner.read(f"{layer}{_BIAS}", bias)
            if bool(bias.any()):
                raise UnsupportedModelError(f"tensor {layer}{_BIAS} is not zero, but the model has no such bias")


def read_stack(source: WeightSource, pieces: Sequence[WeightPiece]) -> Int4Part | None:
    """Read the matrices of `pieces`, stacked in their order; None if one of them has to be read as floats.

    Raise `UnsupportedModelError` for pieces in groups of different kinds or orders.
    """
    parts = _read_parts(source, pieces)
    if not parts:
        return None
    unlike = _difference(parts)
    if unlike is not None:
        names = ", ".join(dict.fromkeys(piece.name for piece in pieces))
        raise UnsupportedModelError(f"{names}: one product of parts {unlike} is not supported")
    return Int4Part(_stacked(parts), parts[0].inputs)


def read_experts(source: WeightSource, pieces: Sequence[WeightPiece]) -> Int4Weight | None:
    """Read the matrices of `pieces`, stacked in their order; None if they have to be read as floats: also those in
    unlike groups, and with columns in another order than their inputs.
    """
    parts = _read_parts(source, pieces)
    if not parts or _difference(parts) is not None or parts[0].inputs is not None:
        return None
    return _stacked(parts)


def _read_parts(source: WeightSource, pieces: Sequence[WeightPiece]) -> list[Int4Part]:
    """Read pieces in four bits; none of them if one has to be read as floats."""
    if not isinstance(source, Int4Reader) or not source.keeps_int4(pieces):
        return []
    return [source.read_int4(piece) for piece in pieces]


def _difference(parts: Sequence[Int4Part]) -> str | None:
    """Return why parts cannot be stacked; None if they can."""
    if len({(part.weight.group, part.weight.offsets is None) for part in parts}) > 1:
        return "in unlike groups of four bits"
    if not all(_are_equal(parts[0].inputs, part.inputs) for part in parts):
        return "with inputs in unlike orders"
    return None


def _stacked(parts: Sequence[Int4Part]) -> Int4Weight:
    weights = [part.weight for part in parts]
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return Int4Weight(
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(offsets) if offsets else None,
    )


def _are_equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
