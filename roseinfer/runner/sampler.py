"""Choosing the next token of every row at once; only the rows that use a feature pay for it.

Order: log probabilities are taken of the raw logits; then penalties, logit bias, the min_tokens mask; then the
likeliest token, or a draw at the request's temperature through its filters (see `draw`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from roseinfer.kernels.availability import has_triton
from roseinfer.runner.draw import (
    FEW_CANDIDATES,
    MANY_CANDIDATES,
    DrawSettings,
    draw_filtered,
    draw_plain,
)
from roseinfer.runner.forward import SampleAt
from roseinfer.runner.logprobs import Scores, score
from roseinfer.runner.rng import uniforms
from roseinfer.runner.seats import Feature, Seat, SeatTable
from roseinfer.runner.transfer import rows_at_once, upload

# What stands in for a token where none could be chosen.
NOT_FINITE = -1
NOTHING_LEFT = -2


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: [n] int64, negative where none could be chosen. `scores` cover the rows `scored` in order."""

    tokens: torch.Tensor
    scored: list[int]
    scores: list[Scores]


@dataclass(frozen=True, slots=True)
class _Subset:
    """Some rows of the step. `index` [m] int64 is None if they are all of them, so that nothing is copied then."""

    rows: list[int]
    index: torch.Tensor | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.index is None else tensor.index_select(0, self.index)

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        if self.index is None:
            target.copy_(values)
        else:
            target.index_copy_(0, self.index, values)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows to sample: seat numbers, host records, positions of the new tokens, and the first and last on device."""

    seats: list[int]
    records: list[Seat]
    ends: list[int]
    seat_index: torch.Tensor
    end_index: torch.Tensor
    features: int

    def subset(self, rows: list[int]) -> _Subset:
        if len(rows) == len(self.seats):
            return _Subset(rows, None)
        return _Subset(rows, upload(rows, torch.int64, self.seat_index.device))

    def that_use(self, feature: int) -> list[int]:
        return [i for i, record in enumerate(self.records) if record.features & feature]


class Sampler:
    """Samples for the seats of one table, and keeps their token pool and penalty counts up to date."""

    def __init__(self, seats: SeatTable) -> None:
        self._seats = seats
        self._kernels = None
        # What needs neither float32 logits nor int64 indices.
        self._on_any_logits = 0
        if has_triton(seats.device):
            from roseinfer.runner.cuda_sampler import CudaChoice

            self._kernels = CudaChoice(seats)
            self._on_any_logits = Feature.RANDOM | Feature.FILTERED

    def sample(
        self,
        logits: torch.Tensor,
        seats: list[int],
        ends: list[int],
        on_device: SampleAt | None = None,
    ) -> Sampled:
        """Choose one token per row and write it to the token pool.

        logits: [n, V]; if they are float32 they may be overwritten. Row i belongs to seat seats[i], whose next token
        has position ends[i]. `on_device`: the two on the device, if they are there already.
        """
        rows = self._rows(seats, ends, on_device)
        if rows.features & ~self._on_any_logits:
            rows = replace(rows, seat_index=rows.seat_index.long(), end_index=rows.end_index.long())
            # Edits go through a flat view, and a GPU's logits may be columns of a wider buffer.
            logits = logits.float().contiguous()
        raw = self._raw(logits, rows)
        self._edit(logits, rows)
        tokens = self._choose(logits, rows)
        if rows.features & Feature.PENALISED:
            penalised = rows.subset(rows.that_use(Feature.PENALISED))
            usable = penalised.of(tokens).clamp_min(0)
            self._seats.penalties.count(self._penalty_rows(rows, penalised), usable)
        return self._score(tokens, rows, raw)

    def _choose(self, logits: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """Tokens [n] int64, negative where there is no answer, written to the pool where the next step reads them."""
        if self._kernels is not None:
            return self._kernels.choose(logits, rows.seat_index, rows.end_index, rows.features)
        best, tokens = logits.max(-1)
        if rows.features & Feature.RANDOM:
            self._draw(logits, best, tokens, rows)
        return self._settle(rows, tokens, best)

    def _rows(self, seats: list[int], ends: list[int], on_device: SampleAt | None) -> _Rows:
        table = self._seats
        records = [table.at(seat) for seat in seats]
        features = 0
        for record in records:
            features |= record.features
        if on_device is None:
            seat_index, end_index = upload((seats, ends), torch.int64, table.device)
        else:
            seat_index, end_index = on_device
        return _Rows(seats, records, ends, seat_index, end_index, features)

    def _settle(self, rows: _Rows, tokens: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Mark rows that have no answer, and write the others' tokens where the next step reads them."""
        table = self._seats
        failed = torch.where(best == -torch.inf, NOTHING_LEFT, NOT_FINITE)
        tokens = torch.where(torch.isfinite(best), tokens, failed)
        # A failed row's next step may be on its way already and needs a valid id.
        usable = tokens.clamp_min(0)
        where = rows.seat_index * table.tokens.shape[1] + rows.end_index
        table.tokens.view(-1).index_copy_(0, where, usable.int())
        return tokens

    # --- before the choice --------------------------------------------------------------------------------------
    def _edit(self, logits: torch.Tensor, rows: _Rows) -> None:
        if rows.features & Feature.PENALISED:
            for part in _parts(rows.that_use(Feature.PENALISED), logits):
                self._penalise(logits, rows, rows.subset(part))
        if rows.features & Feature.BIASED:
            biased = rows.that_use(Feature.BIASED)
            records = [rows.records[i] for i in biased]
            where = _flat_index(logits, biased, [record.bias_ids for record in records])
            values = torch.cat([record.bias_values for record in records])
            logits.view(-1).index_add_(0, where, values)
        if rows.features & Feature.MIN_TOKENS:
            short = [i for i in rows.that_use(Feature.MIN_TOKENS) if _below_min_tokens(rows, i)]
            if short:
                where = _flat_index(logits, short, [rows.records[i].stop_ids for i in short])
                logits.view(-1).index_fill_(0, where, -torch.inf)

    def _penalise(self, logits: torch.Tensor, rows: _Rows, subset: _Subset) -> None:
        """Change the logits of the tokens each row knows; a token known twice is written twice, with the same value."""
        longest = max(rows.ends[i] for i in subset.rows)
        tokens = self._seats.known_tokens(subset.of(rows.seat_index), subset.of(rows.end_index), longest)
        row = torch.arange(len(logits), device=logits.device) if subset.index is None else subset.index
        where = (row[:, None] * logits.shape[1] + tokens).view(-1)
        flat = logits.view(-1)
        values = flat.index_select(0, where).view_as(tokens)
        values = self._seats.penalties.apply(values, tokens, self._penalty_rows(rows, subset))
        flat.index_copy_(0, where, values.view(-1))

    def _penalty_rows(self, rows: _Rows, subset: _Subset) -> torch.Tensor:
        index = self._seats.penalties.rows([rows.seats[i] for i in subset.rows])
        return upload(index, torch.int64, self._seats.device)

    # --- the draw -----------------------------------------------------------------------------------------------
    def _draw(self, logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, rows: _Rows) -> None:
        """Replace the likeliest token by a draw in the rows that want one."""
        drawn = rows.that_use(Feature.RANDOM)
        filtered = [i for i in drawn if rows.records[i].features & Feature.FILTERED]
        plain = [i for i in drawn if not rows.records[i].features & Feature.FILTERED]
        for draw, group in ((draw_plain, plain), (draw_filtered, filtered)):
            for part in _parts(group, logits):
                subset = rows.subset(part)
                settings, u = self._draw_settings(rows, subset)
                subset.write(tokens, draw(subset.of(logits), subset.of(best), settings, u))

    def _draw_settings(self, rows: _Rows, subset: _Subset) -> tuple[DrawSettings, torch.Tensor]:
        """Settings and random numbers of some rows."""
        seat = subset.of(rows.seat_index)
        temperature, top_p, min_p = self._seats.settings.index_select(0, seat).unbind(1)
        seed, prompt_len, top_k = self._seats.integers.index_select(0, seat).unbind(1)
        params = [rows.records[i].params for i in subset.rows]
        settings = DrawSettings(
            temperature,
            top_p,
            min_p,
            top_k,
            any_min_p=any(p.min_p > 0 for p in params),
            any_whole_mass=any(p.top_p < 1 and p.top_k == 0 for p in params),
            candidates=_candidates([p.top_k for p in params]),
        )
        return settings, uniforms(seed, subset.of(rows.end_index) - prompt_len)

    # --- log probabilities --------------------------------------------------------------------------------------
    def _raw(self, logits: torch.Tensor, rows: _Rows) -> torch.Tensor | None:
        """The logits [m, V] of the rows that want log probabilities, safe from editing."""
        if not rows.features & Feature.LOGPROBS:
            return None
        wanted = rows.subset(rows.that_use(Feature.LOGPROBS)).of(logits)
        edited = rows.features & (Feature.PENALISED | Feature.BIASED | Feature.MIN_TOKENS)
        return wanted.clone() if edited and wanted is logits else wanted

    def _score(self, tokens: torch.Tensor, rows: _Rows, raw: torch.Tensor | None) -> Sampled:
        if raw is None:
            return Sampled(tokens, [], [])
        scored = rows.that_use(Feature.LOGPROBS)
        wanted = [rows.records[i].params.logprobs or 0 for i in scored]
        chosen = rows.subset(scored).of(tokens).clamp_min(0)
        return Sampled(tokens, scored, score(raw, chosen, wanted))


def _below_min_tokens(rows: _Rows, i: int) -> bool:
    record = rows.records[i]
    return rows.ends[i] - record.prompt_len < record.params.min_tokens


def _flat_index(logits: torch.Tensor, rows: list[int], ids: list[torch.Tensor]) -> torch.Tensor:
    """Indices into the flattened logits [n * V] of the token ids `ids[i]` of row `rows[i]`."""
    layout = upload((rows, [len(t) for t in ids]), torch.int64, logits.device)
    offsets = torch.repeat_interleave(layout[0] * logits.shape[1], layout[1], output_size=sum(map(len, ids)))
    return offsets + torch.cat(ids)


def _parts(rows: list[int], logits: torch.Tensor) -> Iterator[list[int]]:
    size = rows_at_once(logits)
    return (rows[at : at + size] for at in range(0, len(rows), size))


def _candidates(top_k: list[int]) -> tuple[int, ...]:
    """Numbers of candidates to try: first one more than the largest k, so that a tie at the border shows."""
    needed = [k + 1 if k else FEW_CANDIDATES for k in top_k]
    first = max((n for n in needed if n < MANY_CANDIDATES), default=FEW_CANDIDATES)
    return (first, MANY_CANDIDATES)
