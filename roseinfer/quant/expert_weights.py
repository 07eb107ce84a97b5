"""The matrices of a layer's experts, in the order in which they are stacked."""

import torch

from roseinfer.parallel.group import Share
from roseinfer.quant.base import Piece, WeightSource, read_new
from roseinfer.quant.experts import ExpertNames, ExpertShape


def expert_pieces(shape: ExpertShape, share: Share, names: ExpertNames) -> tuple[list[Piece], list[Piece]]:
    """The matrices of a layer's experts in the order of their numbers: gate and up of each, and down of each.

    share: of each expert's width. Stacked, the first are [count * 2 * share.width, hidden], the second
    [count * hidden, share.width].
    """
    hidden = Share(0, shape.hidden, shape.hidden)
    numbers = range(shape.count)
    gate_up = [Piece(name.format(number), share, hidden) for number in numbers for name in (names.gate, names.up)]
    return gate_up, [Piece(names.down.format(number), hidden, share) for number in numbers]


def read_router(source: WeightSource, shape: ExpertShape, names: ExpertNames, dtype: torch.dtype) -> torch.Tensor:
    """The router's matrix [count, hidden] in `dtype`, a float type."""
    return read_new(source, f"{names.router}.weight", shape.count, shape.hidden, dtype=dtype)
