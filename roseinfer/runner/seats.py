"""What the runner keeps of every seated request, on the host and on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roseinfer.core.plan import Admission, Row
from roseinfer.core.sampling import SamplingParams
from roseinfer.runner.penalties import Penalties
from roseinfer.runner.transfer import upload, write_ranges

# Smallest normal float32: a temperature above 0 must not vanish when it divides float32 logits.
MIN_TEMPERATURE = 1.2e-38


class Feature:
    """What the sampler has to do for a seat, as bits of one int; 0 is plain greedy."""

    RANDOM = 1
    FILTERED = 2  # top-k or top-p
    PENALISED = 4
    BIASED = 8
    MIN_TOKENS = 16
    LOGPROBS = 32


@dataclass(slots=True)
class Seat:
    """Host side of a seated request.

    `stop_ids` and `bias_*` are on the device: what min_tokens masks and what logit_bias adds, empty if nothing.
    `num_blocks` is the length of the block table.
    """

    request_id: str
    prompt_len: int
    params: SamplingParams
    features: int
    num_blocks: int
    stop_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor


class SeatTable:
    """Per-seat state, S = max_num_seqs seats and one spare that nobody sits on.

    The spare seat, number S, is what rows that only pad a batch refer to; `spare_block` is all its block table names.

    tokens: [S + 1, max_model_len + 1] int32, the token pool: every known token at its position. A request that fills
    the context may still sample one token, hence the last column.
    block_tables: [S + 1, max_blocks] int32; stale entries are valid block ids.
    settings: [S, 3] float64: temperature, top_p, min_p. integers: [S, 3] int64: seed, prompt_len, top_k.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        spare_block: int = 0,
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.spare = max_num_seqs
        rows = max_num_seqs + 1
        self.tokens = torch.zeros((rows, max_model_len + 1), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((rows, self.max_blocks), dtype=torch.int32, device=device)
        self.block_tables[self.spare] = spare_block
        self.settings = torch.zeros((max_num_seqs, 3), dtype=torch.float64, device=device)
        self.integers = torch.zeros((max_num_seqs, 3), dtype=torch.int64, device=device)
        self._no_ids = torch.zeros(0, dtype=torch.int64, device=device)
        self._no_values = torch.zeros(0, dtype=torch.float32, device=device)
        self.penalties = Penalties(vocab_size, device)
        self.seats: list[Seat | None] = [None] * max_num_seqs
        self.broken: dict[int, str] = {}  # seat -> why it cannot run

    def at(self, index: int) -> Seat:
        seat = self.seats[index]
        assert seat is not None, "a row names a seat that nobody was admitted to"
        return seat

    def release(self, seats: list[int]) -> None:
        for seat in seats:
            self.seats[seat] = None
            self.broken.pop(seat, None)
            self.penalties.release(seat)

    def admit(self, admissions: list[Admission]) -> None:
        """Seat requests, also after a preemption: everything is rebuilt from the tokens known so far."""
        if not admissions:
            return
        seats = [a.seat for a in admissions]
        zeros = [0] * len(seats)
        tokens = [self._seat(a) for a in admissions]
        write_ranges(self.tokens, seats, zeros, tokens)
        write_ranges(self.block_tables, seats, zeros, [a.blocks for a in admissions])
        self._write_settings(admissions, seats)
        for a in admissions:
            if self.at(a.seat).features & Feature.PENALISED:
                outputs = self.tokens[a.seat, a.prompt_len : len(a.token_ids)]
                self.penalties.admit(a.seat, a.params, outputs)

    def known_tokens(self, seat: torch.Tensor, end: torch.Tensor, longest: int) -> torch.Tensor:
        """Token ids [n, longest] int64 at positions below `end` [n] of seats [n]; shorter rows repeat their first."""
        tokens = self.tokens[:, :longest].index_select(0, seat).long()
        known = torch.arange(longest, device=self.device) < end[:, None]
        return torch.where(known, tokens, tokens[:, :1])

    def grow_tables(self, rows: Sequence[Row]) -> None:
        """Write the block-table entries that rows bring, in one scatter."""
        for row in rows:
            self.at(row.seat).num_blocks = row.table_from + len(row.new_blocks)
        seats, columns = [row.seat for row in rows], [row.table_from for row in rows]
        write_ranges(self.block_tables, seats, columns, [row.new_blocks for row in rows])

    def _seat(self, a: Admission) -> Sequence[int]:
        """Fill the host side; returns the token ids to write, harmless ones if they are unusable."""
        assert 0 < a.prompt_len <= len(a.token_ids) <= self.max_model_len, "the scheduler refuses what cannot fit"
        params = a.params
        no_ids, no_values = self._no_ids, self._no_values
        features = _features(params, a.stop_ids)
        seat = Seat(a.request_id, a.prompt_len, params, features, len(a.blocks), no_ids, no_ids, no_values)
        self.seats[a.seat] = seat
        error = self._unusable(a)
        if error is not None:
            self.broken[a.seat] = error
            seat.features = 0
            return [0] * len(a.token_ids)
        if seat.features & Feature.BIASED:
            ids, values = zip(*params.logit_bias, strict=True)
            seat.bias_ids = upload(ids, torch.int64, self.device)
            seat.bias_values = upload(values, torch.float32, self.device)
        if seat.features & Feature.MIN_TOKENS:
            in_vocab = [token for token in a.stop_ids if token < self.vocab_size]
            seat.stop_ids = upload(in_vocab, torch.int64, self.device)
        return a.token_ids

    def _unusable(self, a: Admission) -> str | None:
        """An id outside the vocabulary would fail the whole step, on a GPU the whole process."""
        ids = a.token_ids
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            return f"a token id is outside the vocabulary of {self.vocab_size}"
        if any(token >= self.vocab_size for token, _ in a.params.logit_bias):
            return f"logit_bias names a token outside the vocabulary of {self.vocab_size}"
        return None

    def _write_settings(self, admissions: list[Admission], seats: list[int]) -> None:
        index = upload(seats, torch.int64, self.device)
        settings = [(max(a.params.temperature, MIN_TEMPERATURE), a.params.top_p, a.params.min_p) for a in admissions]
        integers = [(a.seed, a.prompt_len, min(a.params.top_k, self.vocab_size)) for a in admissions]
        self.settings.index_copy_(0, index, upload(settings, torch.float64, self.device))
        self.integers.index_copy_(0, index, upload(integers, torch.int64, self.device))


def _features(params: SamplingParams, stop_ids: tuple[int, ...]) -> int:
    features = 0
    if not params.greedy:
        features |= Feature.RANDOM
        features |= Feature.FILTERED if params.top_k > 0 or params.top_p < 1 else 0
    features |= Feature.PENALISED if params.penalised else 0
    features |= Feature.BIASED if params.logit_bias else 0
    features |= Feature.MIN_TOKENS if params.min_tokens > 0 and stop_ids else 0
    features |= Feature.LOGPROBS if params.logprobs is not None else 0
    return features
