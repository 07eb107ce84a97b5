"""From hidden states to logits."""

import torch

from roseinfer.layers.embedding import Embedding, padded_rows
from roseinfer.layers.linear import Linear, NormedLinear
from roseinfer.layers.norm import Norm
from roseinfer.layers.weights import WeightSource


class LMHead:
    """hidden [L, width] -> logits of norm(hidden) [L, vocab].

    On a GPU the product has a few columns more than the vocabulary (see `Embedding`), which are not shown.
    Tied to the embedding, a GPU shares its table. A CPU keeps a second, packed copy of it (GPT-2: 154 MB in float32),
    because the table is looked up in its plain layout and the head is a large part of a decode step's weight reads.
    """

    def __init__(self, norm: Norm, width: int, vocab: int, *, tied: bool) -> None:
        self._linear = NormedLinear(norm, Linear(width, vocab))
        self._width, self._vocab = width, vocab
        self._tied = tied

        self.padded_vocab: int

    def load(self, source: WeightSource, norm: str, name: str, embedding: Embedding) -> None:
        weight = embedding.padded
        if not self._tied:
            weight = padded_rows(self._vocab, self._width, source)
            source.read(f"{name}.weight", weight[: self._vocab])
        self.padded_vocab = weight.shape[0]
        self._linear.use(source, norm, weight)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`out`: [L, padded_vocab], which the result is then a view of."""
        if hidden.shape[0] == 0:
            return hidden.new_empty((0, self._vocab))
        return self._linear(hidden, out=out)[:, : self._vocab]
