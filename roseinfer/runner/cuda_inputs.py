"""Batches on a GPU: one copy uploads a step's rows, and one kernel expands them to the inputs of the forward pass."""

from dataclasses import replace
from itertools import accumulate, chain
from operator import add, sub
from typing import NamedTuple

import numpy as np
import torch

from roseinfer.attention.base import CHUNK_FIELD_COUNT, ShortRows
from roseinfer.attention.batch import AdapterRows, ForwardBatch, Paging
from roseinfer.kernels.common.inputs import COUNT, FIRST, SEAT, START, WRITE_FROM, expand_rows
from roseinfer.runner.device import Staging, aligned
from roseinfer.runner.forward import Columns, PreparedBatch, state_batch
from roseinfer.runner.rows import SampleAt
from roseinfer.runner.seats import SeatTable
from roseinfer.state.batch import (
    PIECE_FIELD_COUNT,
    ROW_FIELD_COUNT,
    StateBatch,
    StateRow,
    max_pieces,
    table_size,
    tables_in,
)

# Layout for `expand_rows`: an int32 table with a column for each row of the step. Two more lines follow: the position
# of the row's next token, and the context of a decoding row (0 for chunks).
END = COUNT + 1
DECODE_LEN = END + 1
FIELDS = DECODE_LEN + 1
# A captured step has room for pieces of 64 tokens of states, and for so many shorter ones. Each costs every replay.
_MAX_SHORT_PIECES = 32


class CudaInputs:
    """Buffers for steps of at most `max_rows` rows, `max_tokens` tokens and `max_drafts` drafts, which all steps reuse.

    The next step overwrites them. One stream makes that safe, since its kernels come later.
    """

    def __init__(self, seats: SeatTable, max_rows: int, max_tokens: int, max_drafts: int = 0) -> None:
        device = seats.device
        rows, tokens = _width(max_rows), aligned(max_tokens)
        self.seats = seats
        self.max_rows = max_rows
        # Layout, rows of tokens, drafts, positions that need logits, samples, a map of chunks, and tables of states.
        samples = rows + aligned(max_drafts)
        size = FIELDS * rows + 3 * tokens + 2 * samples + CHUNK_FIELD_COUNT * (rows + tokens)
        self.staging = Staging(size + self._states_size(max_rows, max_tokens), device)
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slots = torch.zeros((len(seats.tables), tokens), dtype=torch.int64, device=device)[:, :max_tokens]
        self._slots_of = self.slots.unbind()
        self.context_len = torch.zeros(rows, dtype=torch.int32, device=device)
        self.query_start = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._adapters = torch.full((max_tokens if self.has_adapters else 0,), -1, dtype=torch.int32, device=device)
        self.one_each = torch.arange(rows, dtype=torch.int32, device=device)
        self._no_drafts = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._numbers = np.arange(rows, dtype=np.int32)

    # --- any step, for an eager forward pass --------------------------------------------------------------------
    def prepare(self, columns: Columns) -> PreparedBatch:
        num_rows, num_tokens = len(columns.seat), sum(columns.count)
        width = aligned(num_rows)
        host = self.staging.fill()
        context_lens = self._write_rows(host, columns, width)
        tokens_at, drafts_at, tail_at, _ = _mixed_sections(width, num_tokens, 0)
        host[tokens_at : tokens_at + num_tokens] = _rows_of_tokens(columns)
        _write_drafts(host[drafts_at:tail_at], columns)
        tail = _Tail.write(host, tail_at, columns, width)
        on_device = self.staging.send(tail.end)
        adapted = self.adapted(columns)
        layout = self._expand_mixed(on_device, width, num_tokens, adapted)
        batch = ForwardBatch(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            query_start=self.query_start[: num_rows + 1],
            context_len=self.context_len[:num_rows],
            table_rows=layout[SEAT, :num_rows],
            paging=self._paging(num_tokens),
            logits_at=tail.logits_at(on_device),
            query_lens=list(columns.count),
            context_lens=context_lens,
            max_query=max(columns.count),
            num_decodes=columns.num_decodes,
            states=state_batch(columns, self.seats),
            adapters=AdapterRows([], self._adapters[:num_tokens]) if adapted else None,
        )
        return PreparedBatch(batch, tail.sample_at(on_device))

    # --- decode steps, for captured graphs ----------------------------------------------------------------------
    def stage_decodes(self, columns: Columns, bucket: int) -> SampleAt:
        """Upload a step with one token per row, padded to `bucket` rows, for a captured `decode_batch`."""
        num_rows, width = len(columns.seat), aligned(bucket)
        host, end = self.staging.fill(), FIELDS * width
        layout = host[:end].reshape(FIELDS, width)
        self._write_seats(layout, columns)
        layout[FIRST] = self._numbers[:width]
        layout[COUNT] = 1
        np.add(layout[START], 1, out=layout[END])
        if self.seats.states is None:
            on_device = self.staging.send(end).view(FIELDS, width)
        else:
            states_end = self._write_states(host, end, bucket, 0, columns, padding=bucket - num_rows)
            on_device = self.staging.send(states_end)[:end].view(FIELDS, width)
        return SampleAt(on_device[SEAT, :num_rows], on_device[END, :num_rows])

    def decode_batch(self, bucket: int, adapted: bool = False) -> ForwardBatch:
        """Launch the kernel that reads what `stage_decodes` uploads, and return the batch; to be captured.

        adapted: for steps whose rows may have adapters.
        """
        ones, no_drafts = self.one_each[:bucket], self._no_drafts[:bucket]
        layout = self._expand(self.staging.device, aligned(bucket), ones, no_drafts, adapted)
        states = self._states_at(layout.numel(), bucket, 0)
        return self._placeholder(bucket, bucket, layout, states, adapted)

    def decode_samples(self, bucket: int) -> SampleAt:
        """Return where the tokens of a captured decode step go. Those of padding go to the spare seat."""
        layout = self.staging.device[: FIELDS * aligned(bucket)].view(FIELDS, -1)
        return SampleAt(layout[SEAT, :bucket], layout[END, :bucket])

    # --- steps that mix chunks and decodes, for captured graphs ---------------------------------------------------
    def stage_mixed(self, columns: Columns, bucket: int, chunk_map: np.ndarray, chunks: int) -> "StagedMixed":
        """Upload any step and its `chunk_map`, padded to `bucket` tokens and `chunks` entries of the map.

        chunk_map: [g, CHUNK_FIELD_COUNT]. chunks: at most rows plus tokens.
        """
        rows = min(bucket, self.max_rows)
        num_tokens, width = sum(columns.count), _width(rows)
        host = self.staging.fill()
        context_lens = self._write_rows(host, columns, width)
        decodes = columns.num_decodes
        host[DECODE_LEN * width : FIELDS * width] = 0
        host[DECODE_LEN * width : DECODE_LEN * width + decodes] = context_lens[:decodes]
        tokens_at, drafts_at, map_at, tail_at = _mixed_sections(width, bucket, chunks)
        host[tokens_at : tokens_at + num_tokens] = _rows_of_tokens(columns)
        host[tokens_at + num_tokens : drafts_at] = -1
        _write_drafts(host[drafts_at:map_at], columns)
        host[map_at : map_at + chunk_map.size] = chunk_map.reshape(-1)
        host[map_at + chunk_map.size : tail_at] = -1
        tail_at = self._write_states(host, tail_at, rows, state_pieces(bucket, rows), columns)
        tail = _Tail.write(host, tail_at, columns, width)
        on_device = self.staging.send(tail.end)
        return StagedMixed(tail.logits_at(on_device), tail.sample_at(on_device))

    def mixed_batch(self, bucket: int, chunks: int, divided: bool = False, adapted: bool = False) -> ForwardBatch:
        """Launch the kernel that reads what `stage_mixed` uploads, and return the batch; to be captured.

        divided: whether the map of chunks may divide contexts. adapted: for steps whose rows may have adapters.
        """
        rows = min(bucket, self.max_rows)
        width = _width(rows)
        _, _, map_at, states_at = _mixed_sections(width, bucket, chunks)
        staged = self.staging.device
        layout = self._expand_mixed(staged, width, bucket, adapted)
        chunk_map = staged[map_at : map_at + CHUNK_FIELD_COUNT * chunks].view(chunks, CHUNK_FIELD_COUNT)
        states = self._states_at(states_at, rows, state_pieces(bucket, rows))
        return self._placeholder(bucket, rows, layout, states, adapted, chunk_map, divided)

    def short_row_batch(self, bucket: int, limits: ShortRows, adapted: bool = False) -> ForwardBatch:
        """Do as `mixed_batch` for steps whose rows are within `limits`, staged without a map of chunks."""
        rows = min(bucket, self.max_rows)
        width = _width(rows)
        _, _, _, states_at = _mixed_sections(width, bucket, 0)
        layout = self._expand_mixed(self.staging.device, width, bucket, adapted)
        states = self._states_at(states_at, rows, state_pieces(bucket, rows))
        batch = self._placeholder(bucket, limits.rows, layout, states, adapted)
        return replace(batch, num_decodes=0, max_query=limits.tokens)

    # --- adapters -------------------------------------------------------------------------------------------------
    @property
    def has_adapters(self) -> bool:
        """True if steps may have rows with adapters."""
        return self.seats.adapter_slots is not None

    def adapted(self, columns: Columns) -> bool:
        """Return True if a row of the step has an adapter."""
        return bool(self.seats.adapted) and not self.seats.adapted.isdisjoint(columns.seat)

    # --- parts ----------------------------------------------------------------------------------------------------
    def _write_rows(self, host: np.ndarray, columns: Columns, width: int) -> list[int]:
        """Fill the layout except `DECODE_LEN`; return the context lengths."""
        num_rows = len(columns.seat)
        context_lens = list(map(add, columns.start, columns.count))
        ends = list(accumulate(columns.count))
        layout = host[: FIELDS * width].reshape(FIELDS, width)
        self._write_seats(layout, columns)
        layout[FIRST, :num_rows] = list(map(sub, ends, columns.count))
        layout[FIRST, num_rows:] = ends[-1] if ends else 0
        layout[COUNT, :num_rows] = columns.count
        layout[COUNT, num_rows:] = 0
        layout[END, :num_rows] = context_lens
        return context_lens

    def _write_seats(self, layout: np.ndarray, columns: Columns) -> None:
        """Write seats, starts and where writing begins. Columns past the step's rows name the spare seat."""
        num_rows = len(columns.seat)
        layout[SEAT, :num_rows] = columns.seat
        layout[SEAT, num_rows:] = self.seats.spare
        for field, values in ((START, columns.start), (WRITE_FROM, columns.write_from)):
            layout[field, :num_rows] = values
            layout[field, num_rows:] = 0

    def _expand_mixed(self, staged: torch.Tensor, width: int, num_tokens: int, adapted: bool) -> torch.Tensor:
        """Do as `_expand` for a step of any rows, whose tokens and drafts are staged too."""
        tokens_at, drafts_at, _, _ = _mixed_sections(width, num_tokens, 0)
        drafts = staged[drafts_at : drafts_at + num_tokens]
        return self._expand(staged, width, staged[tokens_at : tokens_at + num_tokens], drafts, adapted)

    def _expand(
        self, staged: torch.Tensor, width: int, token_rows: torch.Tensor, drafts: torch.Tensor, adapted: bool
    ) -> torch.Tensor:
        """Launch `expand_rows` on the layout at the beginning of `staged`, and return the layout."""
        layout = staged[: FIELDS * width].view(FIELDS, width)
        num_tokens = token_rows.shape[0]
        expand_rows(
            layout,
            token_rows,
            drafts,
            self.seats.tokens,
            self.seats.all_tables,
            self.seats.block_size,
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slots[:, :num_tokens],
            self.context_len[:width],
            self.query_start[: width + 1],
            self.seats.adapter_slots if adapted else None,
            self._adapters[:num_tokens] if adapted else None,
        )
        return layout

    def _paging(self, tokens: int) -> tuple[Paging, ...]:
        found = zip(self.seats.tables, self._slots_of, strict=True)
        return tuple(Paging(tables, slots[:tokens]) for tables, slots in found)

    def _placeholder(
        self,
        tokens: int,
        rows: int,
        layout: torch.Tensor,
        states: StateBatch | None,
        adapted: bool,
        chunk_map: torch.Tensor | None = None,
        divided: bool = False,
    ) -> ForwardBatch:
        """Return a batch whose contents change between replays; its host-side counts are meaningless."""
        return ForwardBatch(
            input_ids=self.input_ids[:tokens],
            positions=self.positions[:tokens],
            query_start=self.query_start[: rows + 1],
            context_len=self.context_len[:rows],
            table_rows=layout[SEAT, :rows],
            paging=self._paging(tokens),
            logits_at=self.one_each[:rows],
            query_lens=[1] * rows,
            context_lens=[1] * rows,
            max_query=1,
            num_decodes=rows,
            decode_len=None if chunk_map is None else layout[DECODE_LEN, :rows],
            chunk_map=chunk_map,
            divided=divided,
            states=states,
            adapters=AdapterRows([], self._adapters[:tokens]) if adapted else None,
        )

    # --- recurrent states -----------------------------------------------------------------------------------------
    def fits_states(self, columns: Columns, bucket: int) -> bool:
        """Return True if a captured step of so many tokens has room for the rows' pieces and snapshots."""
        states = self.seats.states
        return states is None or states.num_pieces(columns.count) <= state_pieces(bucket, min(bucket, self.max_rows))

    def _states_size(self, rows: int, tokens: int) -> int:
        return 0 if self.seats.states is None else aligned(table_size(rows, state_pieces(tokens, rows)))

    def _write_states(
        self, host: np.ndarray, at: int, rows: int, pieces: int, columns: Columns, padding: int = 0
    ) -> int:
        """Write the tables of a captured step's states, and return where they end.

        padding: rows of one token of the spare seat, after a step's rows of one token.
        """
        states = self.seats.states
        if states is None:
            return at
        lines_end = at + ROW_FIELD_COUNT * rows
        end = lines_end + PIECE_FIELD_COUNT * pieces
        tables = (
            host[at:lines_end].reshape(ROW_FIELD_COUNT, rows),
            host[lines_end:end].reshape(pieces, PIECE_FIELD_COUNT),
        )
        seats, starts = (*columns.seat, *(self.seats.spare,) * padding), (*columns.start, *(0,) * padding)
        states.write(*tables, columns.order, seats, starts, columns.count, columns.num_decodes + padding)
        return aligned(end)

    def _states_at(self, at: int, rows: int, pieces: int) -> StateBatch | None:
        """Return what a captured step reads of its states, whose tables are staged there."""
        states = self.seats.states
        if states is None:
            return None
        padding = StateRow(states.num_slots, 0, 0)
        return StateBatch(states.store, (padding,) * rows, (), tables_in(self.staging.device[at:], rows, pieces))


class StagedMixed(NamedTuple):
    """Parts of a staged step that the graph does not read: positions that need logits [L], and places of samples."""

    logits_at: torch.Tensor
    sample_at: SampleAt


class _Tail:
    """Staged integers that vary in number: positions that need logits, then seats and ends of the samples."""

    def __init__(self, start: int, num_logits: int, num_samples: int) -> None:
        self._start, self._num_logits, self._num_samples = start, num_logits, num_samples
        self._seats = start + aligned(num_logits)
        self._ends = self._seats + aligned(num_samples)
        self.end = self._ends + num_samples

    @classmethod
    def write(cls, host: np.ndarray, start: int, columns: Columns, width: int) -> "_Tail":
        ends = list(accumulate(columns.count))
        layout, sampling = host[: FIELDS * width].reshape(FIELDS, width), np.flatnonzero(columns.sample)
        seats, sample_ends = layout[SEAT, sampling], layout[END, sampling]
        if any(columns.drafts):  # a sample after each of them
            counts = np.fromiter(map(len, columns.drafts), np.int32, len(columns.drafts))[sampling] + 1
            upto = np.cumsum(counts, dtype=np.int32)
            seats = np.repeat(seats, counts)
            sample_ends = np.repeat(sample_ends + 1 - upto, counts) + np.arange(len(seats), dtype=np.int32)
        tail = cls(start, sum(columns.logits), len(seats))
        wanted = chain.from_iterable(map(range, map(sub, ends, columns.logits), ends))
        host[start : start + tail._num_logits] = np.fromiter(wanted, np.int32, tail._num_logits)
        host[tail._seats : tail._seats + tail._num_samples] = seats
        host[tail._ends : tail.end] = sample_ends
        return tail

    def logits_at(self, on_device: torch.Tensor) -> torch.Tensor:
        return on_device[self._start : self._start + self._num_logits]

    def sample_at(self, on_device: torch.Tensor) -> SampleAt:
        seats = on_device[self._seats : self._seats + self._num_samples]
        return SampleAt(seats, on_device[self._ends : self.end])


def state_pieces(tokens: int, rows: int) -> int:
    """Return the pieces that a captured step of so many tokens has room for. Most rows have one token and no piece."""
    return max_pieces(tokens, min(rows, _MAX_SHORT_PIECES), 0)


def _width(rows: int) -> int:
    """Return the columns of a layout for up to `rows` rows, with at least one more that marks the end of the last row.

    A captured step's padding tokens follow that mark.
    """
    return aligned(rows + 1)


def _rows_of_tokens(columns: Columns) -> np.ndarray:
    return np.repeat(np.arange(len(columns.count), dtype=np.int32), columns.count)


def _write_drafts(host: np.ndarray, columns: Columns) -> None:
    """Write which tokens are drafts, and -1 for the others."""
    host[:] = -1
    if any(columns.drafts):
        rows = zip(accumulate(columns.count), columns.drafts, strict=True)
        places = chain.from_iterable([range(end - len(drafts), end) for end, drafts in rows])
        host[list(places)] = list(chain.from_iterable(columns.drafts))


def _mixed_sections(width: int, tokens: int, chunks: int) -> tuple[int, int, int, int]:
    """Return the offsets of the rows of tokens, the drafts, the map of chunks and the tail in a staged mixed step."""
    tokens_at = FIELDS * width
    drafts_at = tokens_at + aligned(tokens)
    map_at = drafts_at + aligned(tokens)
    return tokens_at, drafts_at, map_at, map_at + aligned(CHUNK_FIELD_COUNT * chunks)
