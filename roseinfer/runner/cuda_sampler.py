"""The choice of tokens on a GPU: a few kernels over all rows of a step, whatever their settings."""

import torch

from roseinfer.kernels.sampling.argmax import greedy
from roseinfer.kernels.sampling.draw import draw
from roseinfer.runner.seats import Feature, SeatTable


class CudaChoice:
    """Greedy and random choice for the seats of one table.

    A row's token depends on its seed, its position and its own logits alone. Where top-k or top-p apply, the draw runs
    through the kept tokens in the order of their ids; a CPU takes them by rank. So the same seed gives other tokens
    there, of the same distribution.
    """

    def __init__(self, seats: SeatTable) -> None:
        self._seats = seats

    def choose(self, logits: torch.Tensor, seats: torch.Tensor, ends: torch.Tensor, features: int) -> torch.Tensor:
        """logits: [n, V]; seats, ends: [n] integers; features: those of all rows together. See `Sampler._choose`."""
        table = self._seats
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if not features & Feature.RANDOM:
            greedy(logits, seats, ends, table.tokens, tokens)
            return tokens
        filtered = bool(features & Feature.FILTERED)
        draw(logits, seats, ends, table.settings, table.integers, table.tokens, tokens, filtered=filtered)
        return tokens
