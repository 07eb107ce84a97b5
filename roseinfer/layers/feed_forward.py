"""Feed-forward networks of a block."""

from collections.abc import Sequence

import torch

from roseinfer.layers.linear import Linear, Split, normed
from roseinfer.quant.base import Norm, Pair, Pairable, WeightSource


class FeedForward:
    """down(activation(up(norm(x)))), or down(activation(gate(norm(x))) * up(norm(x))) (Shazeer, 2020) if it is gated,
    with gate and up in one product.
    """

    def __init__(
        self, hidden: int, intermediate: int, activation: str, *, gated: bool = True, bias: bool = False
    ) -> None:
        outs = (intermediate, intermediate) if gated else (intermediate,)
        self._up = Linear(hidden, *outs, split=Split.OUTPUTS, bias=bias, activation=activation, gated=gated)
        self._down = Linear(intermediate, hidden, split=Split.INPUTS, bias=bias)
        self._pair: Pair | None = None

    def load(self, source: WeightSource, up: Sequence[str], down: str, *, transposed: bool = False) -> None:
        """Load the weights. `up`: names of gate and up, or one name if they are stacked or there is no gate."""
        self._up.load(source, *up, transposed=transposed, feeds=down)
        self._down.load(source, down, transposed=transposed)
        if isinstance(self._up.matmul, Pairable):
            self._pair = self._up.matmul.paired(self._down.matmul)

    def __call__(self, norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the network's result for x [T, hidden], plus the residual if there is one, which may be overwritten
        and may be x itself.
        """
        down = self._down
        if self._pair is None or norm is None:
            return down(normed(self._up, norm, x), residual)
        return down.sum_partials(self._pair(norm, x, down.partial_residual(residual)), residual)
