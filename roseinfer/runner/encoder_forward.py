"""Forward pass of an encoder: whole prompts side by side, without K/V."""

from collections.abc import Callable

import torch

from roseinfer.core.observer import Span, unobserved
from roseinfer.models.encoders.base import EncoderModel, PackedRows
from roseinfer.runner.device import upload
from roseinfer.runner.forward import Columns, Forwarded, mixed_batch, nothing
from roseinfer.runner.seats import SeatTable


class EncoderForward:
    """`ForwardPass` of an encoder. Every row is a whole prompt."""

    def __init__(self, encoder: EncoderModel, seats: SeatTable) -> None:
        self._encoder = encoder
        self._seats = seats
        self._span: Span = unobserved

    def observe(self, span: Span) -> None:
        self._span = span

    def run(self, columns: Columns, staged: Callable[[], None] = nothing) -> Forwarded:
        assert not any(columns.start) and all(columns.sample), "each token sees its whole prompt"
        with self._span("prepare"):
            batch = mixed_batch(columns, self._seats, list(columns.count))
            rows = PackedRows(
                input_ids=batch.input_ids,
                positions=batch.positions,
                query_start=batch.query_start,
                query_lens=list(columns.count),
                token_types=self._token_types(columns, batch.positions),
            )
        staged()
        hidden = self._encoder.forward(rows)
        if sum(columns.logits) < len(hidden):
            hidden = hidden.index_select(0, batch.logits_at)
        return Forwarded(hidden=hidden)

    def _token_types(self, columns: Columns, positions: torch.Tensor) -> torch.Tensor | None:
        """Return 1 for the tokens of second texts, and 0 for others; None if no row has one."""
        if self._encoder.spec.token_types < 2:
            return None
        pooling = [self._seats.at(seat).pooling for seat in columns.seat]
        begins = [0 if each is None else each.second_text_from for each in pooling]
        if not any(begins):
            return None
        ends = [begin or count for begin, count in zip(begins, columns.count, strict=True)]
        second, lengths = upload((ends, columns.count), torch.int64, positions.device)
        return (positions >= torch.repeat_interleave(second, lengths, output_size=len(positions))).long()
