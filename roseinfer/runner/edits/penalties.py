"""Repetition, presence and frequency penalties, with the token counts they need."""

from collections.abc import Sequence

import torch

from roseinfer.core.plan import Admission
from roseinfer.runner.device import upload
from roseinfer.runner.rows import SampledRows, Subset, in_parts


class Penalties:
    """Edit with counts of sampled tokens, only for the seats that use a penalty.

    Counts for all seats would be large (256 seats of 150k tokens: 150 MB), so seats share a pool of rows that grows by
    doubling. Admissions are not batched, since penalties are rare.
    """

    fields = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    def __init__(self, pool: torch.Tensor, vocab_size: int) -> None:
        device = pool.device
        self._pool = pool
        self._row_of: dict[int, int] = {}  # seat -> row of the tensors below
        self._free: list[int] = []
        # float32, as the arithmetic is; it is exact for counts up to 2^24
        self._counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        # repetition, presence, frequency
        self._strengths = torch.zeros((0, 3), dtype=torch.float32, device=device)

    def admit(self, admission: Admission, known: torch.Tensor) -> None:
        """Start counting for a released seat, with the outputs so far."""
        if not self._free:
            self._grow()
        params, outputs = admission.params, known[admission.prompt_len :]
        row = self._row_of[admission.seat] = self._free.pop()
        strengths = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._strengths[row] = upload(strengths, torch.float32, self._strengths.device)
        ones = torch.ones_like(outputs, dtype=torch.float32)
        self._counts[row].zero_().index_add_(0, outputs.long(), ones)

    def release(self, seat: int) -> None:
        row = self._row_of.pop(seat, None)
        if row is not None:
            self._free.append(row)

    def apply(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        for part in in_parts(using, logits):
            self._penalise(logits, rows, rows.subset(part))

    def sampled(self, tokens: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        chosen = rows.subset(using).of(tokens).clamp_min(0)
        self._counts[self._count_rows(rows, using), chosen] += 1

    def output(self, seat: int, token_ids: Sequence[int]) -> None:
        tokens = upload(token_ids, torch.int64, self._counts.device)
        self._counts[self._row_of[seat]].index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))

    def _penalise(self, logits: torch.Tensor, rows: SampledRows, subset: Subset) -> None:
        """Change the logits of each row's known tokens; duplicates are written twice with the same value."""
        longest = max(rows.ends[i] for i in subset.rows)
        tokens = self._known_tokens(subset.of(rows.seat_index), subset.of(rows.end_index), longest)
        row = torch.arange(len(logits), device=logits.device) if subset.index is None else subset.index
        where = (row[:, None] * logits.shape[1] + tokens).view(-1)
        flat = logits.view(-1)
        values = flat.index_select(0, where).view_as(tokens)
        count_rows = self._count_rows(rows, subset.rows)
        counts = self._counts[count_rows[:, None], tokens]
        if rows.drafts_before:
            counts = counts + self._draft_counts(tokens, rows, subset)
        values = self._penalised(values, counts, self._strengths.index_select(0, count_rows))
        flat.index_copy_(0, where, values.view(-1))

    def _known_tokens(self, seat: torch.Tensor, end: torch.Tensor, longest: int) -> torch.Tensor:
        """Return token ids [n, longest] int64 at positions below `end` [n] of seats [n]; shorter rows repeat their
        first.
        """
        tokens = self._pool[:, :longest].index_select(0, seat).long()
        known = torch.arange(longest, device=tokens.device) < end[:, None]
        return torch.where(known, tokens, tokens[:, :1])

    def _draft_counts(self, tokens: torch.Tensor, rows: SampledRows, subset: Subset) -> torch.Tensor:
        """Count each of the tokens [n, L] among the drafts before it, [n, L]: they are output if its row counts."""
        before = [rows.drafts_before.get(i, 0) for i in subset.rows]
        layout = upload(before, torch.int64, tokens.device)
        seats, ends = subset.of(rows.seat_index), subset.of(rows.end_index)
        counts = torch.zeros_like(tokens)
        for back in range(1, max(before) + 1):
            drafts = self._pool[seats, (ends - back).clamp_min(0)]
            counts += (tokens == drafts[:, None]) & (layout >= back)[:, None]
        return counts

    def _count_rows(self, rows: SampledRows, using: list[int]) -> torch.Tensor:
        """Return the rows of the counts of these seats: [m] int64."""
        return upload([self._row_of[rows.seats[i]] for i in using], torch.int64, self._counts.device)

    def _penalised(self, logits: torch.Tensor, counts: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
        """Return penalised logits [n, L] of known tokens. counts: how often they are in the output [n, L]; strengths:
        [n, 3].

        Repetition (Keskar et al., arXiv 1909.05858, with the usual sign handling) divides positive logits of tokens in
        prompt or output, and multiplies negative ones. Presence and frequency follow the OpenAI API: logit - frequency
        * count - presence * (count > 0), with counts over the output. Other tokens do not change, so only known tokens
        are read.
        """
        repetition, presence, frequency = strengths[:, :, None].unbind(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return repeated - counts * frequency - counts.clamp_max(1) * presence

    def _grow(self) -> None:
        old = len(self._counts)
        extra = max(1, old)
        self._free += range(old + extra - 1, old - 1, -1)
        self._counts = _extended(self._counts, extra)
        self._strengths = _extended(self._strengths, extra)


def _extended(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros((extra, tensor.shape[1]))))
