"""Linear layers with weights in four bits, as a checkpoint stores them."""

from collections.abc import Callable, Sequence

import torch

from roseinfer.parallel.group import Share
from roseinfer.quant.base import Epilogue, ExpertNames, Experts, ExpertShape, Matmul, Table, WeightPiece, WeightSource
from roseinfer.quant.int4_part import Int4Reader
from roseinfer.quant.int4_scheme import Int4Scheme
from roseinfer.quant.int4_stored import read_stack
from roseinfer.quant.int4_weight import Int4Weight
from roseinfer.quant.plain import PlainFormat, read_bias

# Makes a product by a weight with its bias and epilogue. The last argument is `Int4Part.inputs`.
MakeProduct = Callable[[Int4Weight, torch.Tensor | None, Epilogue, torch.Tensor | None], Matmul]


class Int4Format:
    """`WeightFormat` for weights in four bits. Layers that are stored as floats stay floats, and experts are widened.

    A layer whose columns are not in the order of its inputs gathers them. Where the layer before it writes nothing
    else, that one's outputs are sorted instead, while they load.
    """

    def __init__(self, stored: Int4Scheme, product: MakeProduct | None) -> None:
        """product: None to multiply by the widened weights, for a device that does not keep them in four bits."""
        self._stored = stored
        self._product = product
        self._plain = PlainFormat()
        self._sorted: set[str] = set()  # layers whose inputs come in the order of their columns

    @property
    def stored_as(self) -> str:
        return f"{self._stored.label}, widened" if self._product is None else self._stored.label

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        part = None if self._product is None else read_stack(source, pieces)
        if self._product is None or part is None:
            return self._plain.load(source, pieces, epilogue)
        weight, bias = part.weight, read_bias(source, pieces)
        inputs = None if pieces[0].name in self._sorted else part.inputs
        order = self._wanted_order(source, pieces)
        if order is not None:
            weight, bias = _with_rows(weight, order), None if bias is None else bias[order]
        return self._product(weight, bias, epilogue, inputs)

    def _wanted_order(self, source: WeightSource, pieces: Sequence[WeightPiece]) -> torch.Tensor | None:
        """Return the outputs in the order in which the next layer's columns are; None if it is theirs."""
        following = pieces[0].feeds
        if following is None or source.build.adapting is not None or not isinstance(source, Int4Reader):
            return None  # adapters know no other order
        order = source.order_of(following)
        if order is None or source.build.group.size > 1:
            return None
        self._sorted.add(following)
        outs = sum(piece.outs.width for piece in pieces)
        return torch.cat([order + start for start in range(0, outs, len(order))])

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        return self._plain.experts(source, shape, share, names)

    def table(self, rows: torch.Tensor) -> Table:
        return self._plain.table(rows)


def _with_rows(weight: Int4Weight, rows: torch.Tensor) -> Int4Weight:
    offsets = None if weight.offsets is None else weight.offsets[rows]
    return Int4Weight(weight.codes[rows], weight.scales[rows], offsets)
