"""Rows of one step, as layers with states see them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from roseinfer.state.store import StateStore

# Longest piece of a row that kernels compute at once.
MAX_PIECE_TOKENS = 64
# Lines of `StateTables.rows` and columns of `StateTables.pieces`.
SLOT, START, FIRST, COUNT, SNAPSHOT, PIECES_FROM, PIECES_TO, REPLAYED, DRAFTS, SNAPSHOT_AFTER = range(10)
PIECED, NUM_PIECED = 10, 11
ROW_FIELD_COUNT, PIECE_FIELD_COUNT = 12, 4


class StateRow(NamedTuple):
    """Row of a step: the slot of its sequence, the position of its first token, and its number of tokens.

    A row at position 0 begins from zeros and does not read its slot. A row of 0 tokens is padding.

    drafts: of the tokens, the last ones that may turn out wrong. The slot then keeps the state after the token before
    them, and their inputs beside it. replayed: drafts of the sequence's last row that were right, whose inputs the slot
    keeps: the state consumes them first. It is that after `start - replayed` tokens. A row with either has one token
    that is no draft.
    """

    slot: int
    start: int
    tokens: int
    drafts: int = 0
    replayed: int = 0


class RowSnapshot(NamedTuple):
    """Copy of a state in the middle of a step: that after the first `tokens` tokens of row `row` is also stored in
    `slot`, which no row reads or writes.

    tokens: at least 1, and drafts do not count. 0 or less: so many tokens before the row's first one, among those that
    it replays.
    """

    row: int
    tokens: int
    slot: int


class StateTables(NamedTuple):
    """Rows of a step on a device, for kernels.

    rows: [ROW_FIELD_COUNT, R] int32: each row's slot, position of its first token, packed index of that token, tokens,
    slot for the snapshot of a row of one token and its drafts (-1: none), its range of `pieces`, replayed tokens,
    drafts, and `RowSnapshot.tokens` of that snapshot. Two more lines hold the numbers of the rows that have pieces, and
    how many these are, repeated. pieces: [P, PIECE_FIELD_COUNT] int32: row, packed index of the first token, tokens (0:
    padding), and slot for the snapshot after the piece (-1: none). Rows of one token and its drafts have no piece,
    since a kernel of their own computes them.
    """

    rows: torch.Tensor
    pieces: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Slots of a step's rows, in the order of `ForwardBatch`, and the snapshots to take.

    A row has at most one snapshot after the same number of tokens. In a batch that is captured in a CUDA graph, rows
    and snapshots are placeholders: only the tables change between replays. tables: None on a CPU.
    """

    store: StateStore
    rows: tuple[StateRow, ...]
    snapshots: tuple[RowSnapshot, ...] = ()
    tables: StateTables | None = None

    @classmethod
    def of(cls, store: StateStore, rows: Sequence[StateRow], snapshots: Sequence[RowSnapshot] = ()) -> "StateBatch":
        """Return the batch, with tables on a GPU."""
        device, tables = store.tensors[0].device, None
        if device.type == "cuda":
            tables = make_tables(rows, snapshots, device)
        return cls(store, tuple(rows), tuple(snapshots), tables)


def make_tables(rows: Sequence[StateRow], snapshots: Sequence[RowSnapshot], device: torch.device) -> StateTables:
    """Upload the tables of these rows, which fit exactly."""
    lines, pieces = lay_out(rows, snapshots)
    packed = torch.from_numpy(np.concatenate((lines.ravel(), pieces.ravel())))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return tables_in(packed, lines.shape[1], len(pieces))


def tables_in(packed: torch.Tensor, rows: int, pieces: int) -> StateTables:
    """Return views of a buffer of at least `table_size(rows, pieces)` int32: the table of rows, then of pieces."""
    end = ROW_FIELD_COUNT * rows
    return StateTables(
        packed[:end].view(ROW_FIELD_COUNT, rows),
        packed[end : end + PIECE_FIELD_COUNT * pieces].view(pieces, PIECE_FIELD_COUNT),
    )


def table_size(rows: int, pieces: int) -> int:
    """Return the integers that tables of so many rows and pieces take."""
    return ROW_FIELD_COUNT * rows + PIECE_FIELD_COUNT * pieces


def max_pieces(tokens: int, rows: int, snapshots: int) -> int:
    """Return the most pieces of a step."""
    return tokens // MAX_PIECE_TOKENS + rows + snapshots


def lay_out(
    rows: Sequence[StateRow], snapshots: Sequence[RowSnapshot], room: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of `StateTables.rows` and `StateTables.pieces`.

    room: numbers of rows and pieces that the tables have, padded with rows and pieces without tokens; by default those
    that there are. A piece ends at 64 tokens, at a snapshot, and at the end of its row.
    """
    taken = _snapshots_by_row(rows, snapshots)
    first, lines = 0, []
    pieces: list[tuple[int, int, int, int]] = []
    for number, (slot, start, count, drafts, replayed) in enumerate(rows):
        slots, before, after, snapshot = taken.get(number, {}), len(pieces), 0, -1
        if count > 1 + drafts:
            assert not drafts and not replayed, "a row with drafts has one other token"
            cuts = sorted({0, *range(MAX_PIECE_TOKENS, count, MAX_PIECE_TOKENS), *slots, count})
            pieces += [(number, first + begin, end - begin, slots.get(end, -1)) for begin, end in pairwise(cuts)]
        elif slots:
            ((after, snapshot),) = slots.items()
        lines.append((slot, start, first, count, snapshot, before, len(pieces), replayed, drafts, after))
        first += count
    num_rows, num_pieces = room or (len(lines), len(pieces))
    assert len(lines) <= num_rows and len(pieces) <= num_pieces, "the tables have no room for this step"
    row_table = np.zeros((ROW_FIELD_COUNT, num_rows), np.int32)
    row_table[:PIECED, : len(lines)] = np.array(lines, np.int32).T
    list_pieced(row_table)
    piece_table = np.zeros((num_pieces, PIECE_FIELD_COUNT), np.int32)
    piece_table[: len(pieces)] = np.array(pieces, np.int32).reshape(-1, PIECE_FIELD_COUNT)
    return row_table, piece_table


def list_pieced(rows: np.ndarray) -> None:
    """Write the numbers of the rows that have pieces to their table."""
    found = np.flatnonzero(rows[PIECES_FROM] < rows[PIECES_TO])
    rows[PIECED] = 0
    rows[PIECED, : len(found)] = found
    rows[NUM_PIECED] = len(found)


def _snapshots_by_row(rows: Sequence[StateRow], snapshots: Sequence[RowSnapshot]) -> dict[int, dict[int, int]]:
    """Return the slots of each row's snapshots by the tokens before them."""
    taken: dict[int, dict[int, int]] = {}
    for number, tokens, slot in snapshots:
        row = rows[number]
        assert -row.replayed < tokens <= row.tokens - row.drafts, f"row {number} has no state after {tokens} tokens"
        assert tokens not in taken.setdefault(number, {}), f"row {number} has two snapshots after {tokens} tokens"
        taken[number][tokens] = slot
    return taken
