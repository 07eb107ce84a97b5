"""Repetition, presence and frequency penalties, with the token counts they need."""

import torch

from roseinfer.core.sampling import SamplingParams
from roseinfer.runner.transfer import upload


class Penalties:
    """How often each token was sampled, for the seats that asked for a penalty and no others.

    A vocabulary times all seats would be large (256 seats of 150k tokens: 150 MB), so seats share a pool of rows that
    grows by doubling. Not batched over admissions: penalised requests are few.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._row_of: dict[int, int] = {}  # seat -> row of the tensors below
        self._free: list[int] = []
        # As float32, which is exact for counts up to 2^24, because the arithmetic is.
        self._counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        # repetition, presence, frequency
        self._strengths = torch.zeros((0, 3), dtype=torch.float32, device=device)

    def admit(self, seat: int, params: SamplingParams, outputs: torch.Tensor) -> None:
        """Start counting for a seat that was released. outputs: token ids [n] sampled so far, on the device."""
        if not self._free:
            self._grow()
        row = self._row_of[seat] = self._free.pop()
        strengths = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._strengths[row] = upload(strengths, torch.float32, self._strengths.device)
        ones = torch.ones_like(outputs, dtype=torch.float32)
        self._counts[row].zero_().index_add_(0, outputs.long(), ones)

    def release(self, seat: int) -> None:
        row = self._row_of.pop(seat, None)
        if row is not None:
            self._free.append(row)

    def rows(self, seats: list[int]) -> list[int]:
        """Where the counts of these (penalised) seats are kept."""
        return [self._row_of[seat] for seat in seats]

    def apply(self, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Penalised logits [n, L] of known tokens. tokens: their ids [n, L] int64; rows: [n], where the counts are.

        Repetition (Keskar et al., arXiv 1909.05858, with the sign handled as everybody does): positive logits of
        tokens in prompt or output are divided by it, negative ones multiplied. Presence and frequency as in the
        OpenAI API: logit - frequency * count - presence * (count > 0), counts over the output. Tokens that are
        neither in the prompt nor in the output stay as they are, so only known tokens need to be looked at.
        """
        counts = self._counts[rows[:, None], tokens]
        repetition, presence, frequency = self._strengths.index_select(0, rows)[:, :, None].unbind(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return repeated - counts * frequency - counts.clamp_max(1) * presence

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one sampled token per row. rows (distinct), tokens: [n] int64."""
        self._counts[rows, tokens] += 1

    def _grow(self) -> None:
        old = len(self._counts)
        extra = max(1, old)
        self._free += range(old + extra - 1, old - 1, -1)
        self._counts = _extended(self._counts, extra)
        self._strengths = _extended(self._strengths, extra)


def _extended(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros((extra, tensor.shape[1]))))
