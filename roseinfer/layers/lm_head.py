"""From hidden states to logits."""

import torch

from roseinfer.layers.embedding import Embedding
from roseinfer.layers.linear import Linear, NormedLinear
from roseinfer.layers.norm import Norm
from roseinfer.layers.weights import WeightSource


class LMHead:
    """hidden [L, width] -> logits of norm(hidden) [L, vocab].

    Tied to the embedding, a GPU shares its table. A CPU keeps a second, packed copy of it (GPT-2: 154 MB in float32),
    because the table is looked up in its plain layout and the head is a large part of a decode step's weight reads.
    """

    def __init__(self, norm: Norm, width: int, vocab: int, *, tied: bool) -> None:
        self._linear = NormedLinear(norm, Linear(width, vocab))
        self._vocab = vocab
        self._tied = tied

    def load(self, source: WeightSource, norm: str, name: str, embedding: Embedding) -> None:
        if self._tied:
            self._linear.use(source, norm, embedding.weight)
        else:
            self._linear.load(source, norm, name)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if hidden.shape[0] == 0:
            return hidden.new_empty((0, self._vocab))
        return self._linear(hidden, out=out)
