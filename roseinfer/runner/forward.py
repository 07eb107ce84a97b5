"""Forward pass: from the rows of a plan to tensors, and on to hidden states or logits.

`ForwardPass` is the interface; GPUs have their own implementations. The one here makes one pass over the rows and a
fixed number of tensor calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat
from operator import add, gt, sub
from typing import Protocol

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import AdapterRows, ForwardBatch, Paging
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.observer import Span, unobserved
from roseinfer.core.plan import Row
from roseinfer.models.base import CausalLM
from roseinfer.runner.device import upload
from roseinfer.runner.rows import SampleAt, Samples
from roseinfer.runner.seats import SeatTable
from roseinfer.state.batch import StateBatch


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows of a step as columns: each field's values in row order. Rows of one token come first.

    order: the plan's index of each row. only_decodes: every row computes, writes and samples one token.
    """

    order: list[int] | range
    only_decodes: bool

    request_id: tuple[str, ...]
    seat: tuple[int, ...]
    start: tuple[int, ...]
    count: tuple[int, ...]
    logits: tuple[int, ...]
    sample: tuple[bool, ...]
    write_from: tuple[int, ...]
    table_from: tuple[int, ...]
    new_blocks: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]

    @property
    def num_decodes(self) -> int:
        return self.count.count(1)

    def samples(self) -> Samples:
        """Return the tokens that the step samples, in the order of the columns; `rows` are the plan's."""
        if any(self.drafts):
            return self._samples_with_drafts()
        places = [place for place, sample in enumerate(self.sample) if sample]
        rows, seats = [self.order[place] for place in places], [self.seat[place] for place in places]
        return Samples(rows, seats, [self.start[place] + self.count[place] for place in places], {})

    def _samples_with_drafts(self) -> Samples:
        found = Samples([], [], [], {})
        for place, row in enumerate(self.order):
            if not self.sample[place]:
                continue
            drafts, end = len(self.drafts[place]), self.start[place] + self.count[place]
            if drafts:
                first = len(found.rows)
                found.drafts_before.update({first + before: before for before in range(drafts + 1)})
            found.rows.extend([row] * (drafts + 1))
            found.seats.extend([self.seat[place]] * (drafts + 1))
            found.ends.extend(range(end - drafts, end + 1))
        return found

    @classmethod
    def of(cls, rows: list[Row]) -> "Columns":
        order: list[int] | range = range(len(rows))
        columns = list(zip(*rows, strict=True)) or [()] * len(Row._fields)
        _, _, start, count, _, sample, write_from, *_ = columns
        only_ones = max(count, default=1) == 1
        if not only_ones and 1 in count:
            order = sorted(order, key=lambda i: count[i] > 1)
            columns = [tuple(column[i] for i in order) for column in columns]
        only_decodes = only_ones and all(sample) and not any(map(gt, write_from, start))
        return cls(order, only_decodes, *columns)


def build_batch(columns: Columns, seats: SeatTable) -> ForwardBatch:
    """Build the batch of at least one row, and write its drafts to the token pool, which must be up to date otherwise,
    as must the block tables.
    """
    if any(columns.drafts):
        seats.write_drafts(columns.seat, columns.start, columns.drafts)
    context_lens = list(map(add, columns.start, columns.count))
    make = _decode_batch if columns.only_decodes else mixed_batch
    batch = make(columns, seats, context_lens)
    return batch if seats.adapted.isdisjoint(columns.seat) else replace(batch, adapters=_adapter_rows(columns, seats))


def _adapter_rows(columns: Columns, seats: SeatTable) -> AdapterRows:
    slots = [seats.at(seat).adapter_slot for seat in columns.seat]
    of_tokens = chain.from_iterable(map(repeat, slots, columns.count))
    return AdapterRows(slots, upload(list(of_tokens), torch.int32, seats.device))


def _decode_batch(columns: Columns, seats: SeatTable, context_lens: list[int]) -> ForwardBatch:
    """Build a batch in which every row computes and samples one token, so row borders do not matter."""
    seat, start = upload((columns.seat, columns.start), torch.int64, seats.device)
    batch = decode_batch(seats, seat, start, _at(seats.tokens, seat, start), context_lens)
    return batch if seats.states is None else replace(batch, states=state_batch(columns, seats))


def decode_batch(
    seats: SeatTable, seat: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor, context_lens: list[int]
) -> ForwardBatch:
    """Build a batch of one token for each of some seats: seat, positions, input_ids [n] int64."""
    n = len(context_lens)
    row = torch.arange(n + 1, device=seats.device)
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        query_start=row.int(),
        context_len=(positions + 1).int(),
        table_rows=seat.int(),
        paging=_paging(seats, seat, positions),
        logits_at=row[:n],
        query_lens=[1] * n,
        context_lens=context_lens,
        max_query=1,
        num_decodes=n,
    )


def mixed_batch(columns: Columns, seats: SeatTable, context_lens: list[int]) -> ForwardBatch:
    n = len(context_lens)
    device = seats.device
    ends = list(accumulate(columns.count))
    firsts = list(map(sub, ends, columns.count))
    layout = (columns.seat, columns.start, columns.count, columns.write_from, context_lens, firsts)
    seat, start, count, write_from, context_len, first = upload(layout, torch.int64, device)
    # row: [T], the row that owns each token.
    row = torch.repeat_interleave(torch.arange(n, device=device), count, output_size=ends[-1])
    positions = torch.arange(ends[-1], device=device) + (start - first)[row]
    token_seat = seat[row]
    wanted = map(range, map(sub, ends, columns.logits), ends)
    return ForwardBatch(
        input_ids=_at(seats.tokens, token_seat, positions),
        positions=positions,
        query_start=torch.cat((first, first[-1:] + count[-1:])).int(),
        context_len=context_len.int(),
        table_rows=seat.int(),
        paging=_paging(seats, token_seat, positions, positions >= write_from[row]),
        logits_at=upload(list(chain.from_iterable(wanted)), torch.int64, device),
        query_lens=list(columns.count),
        context_lens=context_lens,
        max_query=max(columns.count),
        num_decodes=columns.num_decodes,
        states=state_batch(columns, seats),
    )


def state_batch(columns: Columns, seats: SeatTable) -> StateBatch | None:
    """Return the states of the rows, None without any."""
    states = seats.states
    return None if states is None else states.batch(columns.order, columns.seat, columns.start, columns.count)


def _paging(
    seats: SeatTable, seat: torch.Tensor, positions: torch.Tensor, written: torch.Tensor | None = None
) -> tuple[Paging, ...]:
    """Return the storage of tokens in each KV group. seat, positions: [T] int64. written: [T] bool; None for all."""
    entry, offset, found = positions // seats.block_size, positions % seats.block_size, []
    for tables in seats.tables:
        slots = _at(tables, seat, entry) * seats.block_size + offset
        found.append(Paging(tables, slots if written is None else torch.where(written, slots, -1)))
    return tuple(found)


def _at(table: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return table[row, column] as int64 [n]; table: [R, C]."""
    return table.view(-1).index_select(0, row * table.shape[1] + column).long()


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Result of a pass: hidden states [L, d] of all positions that need logits, or logits [n, V] of the n samples.

    sample_at: set if the pass has it on the device anyway. greedy: [n] int64, the choice for rows without any settings,
    already in the token pool; valid until the next pass.
    """

    hidden: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    sample_at: SampleAt | None = None
    greedy: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Batch on the device, and the places of its samples if they are there as well."""

    batch: ForwardBatch
    sample_at: SampleAt | None = None


def nothing() -> None:
    """Do nothing."""


class ForwardPass(Protocol):
    def run(self, columns: Columns, staged: Callable[[], None] = nothing) -> Forwarded:
        """Launch the forward pass of these rows, and write their drafts to the token pool.

        Token pool and block tables are up to date otherwise. `staged`: called when the rows are on their way to the
        device, just before the model's kernels are launched.
        """
        ...

    def observe(self, span: Span) -> None:
        """Report the phase `prepare` of each further run as a span."""
        ...


def from_rows(seats: SeatTable) -> Callable[[Columns], PreparedBatch]:
    """Return the function that makes batches where nothing is prepared on the device."""

    def prepare(columns: Columns) -> PreparedBatch:
        return PreparedBatch(build_batch(columns, seats))

    return prepare


class EagerForward:
    """`ForwardPass` that prepares the batch, then calls the model layer by layer."""

    def __init__(
        self, model: CausalLM, attention: AttentionBackend, store: KVStore, prepare: Callable[[Columns], PreparedBatch]
    ) -> None:
        self._model = model
        self._attention = attention
        self._store = store
        self._prepare = prepare
        self._span: Span = unobserved

    def observe(self, span: Span) -> None:
        self._span = span

    def run(self, columns: Columns, staged: Callable[[], None] = nothing) -> Forwarded:
        with self._span("prepare"):
            prepared = self._prepare(columns)
        staged()
        batch = prepared.batch
        self._attention.begin(batch, self._store)
        hidden = self._model.forward(batch, self._attention)
        if sum(columns.logits) < hidden.shape[0]:
            hidden = hidden.index_select(0, batch.logits_at)
        return Forwarded(hidden=hidden, sample_at=prepared.sample_at)
