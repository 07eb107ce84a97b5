"""From hidden states to logits."""

import torch

from roseinfer.layers.embedding import Embedding
from roseinfer.layers.linear import Linear
from roseinfer.layers.weights import WeightSource


class LMHead:
    """hidden [L, width] -> logits [L, vocab] float32.

    Tied to the embedding, a GPU shares its table. A CPU keeps a second, packed copy of it (GPT-2: 154 MB in float32),
    because the table is looked up in its plain layout and the head is a large part of a decode step's weight reads.
    """

    def __init__(self, width: int, vocab: int, *, tied: bool) -> None:
        self._linear = Linear(width, vocab)
        self._vocab = vocab
        self._tied = tied

    def load(self, source: WeightSource, name: str, embedding: Embedding) -> None:
        if self._tied:
            self._linear.use(embedding.weight)
        else:
            self._linear.load(source, name)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] == 0:
            return hidden.new_empty((0, self._vocab), dtype=torch.float32)
        return self._linear(hidden).float()
