"""Slots of recurrent states, as plans assign them to seats."""

from collections.abc import Sequence

import numpy as np

from roseinfer.core.plan import Row, StateChanges, StateSnapshot
from roseinfer.runner.host_copies import Copier, StepCopies
from roseinfer.state.batch import (
    COUNT,
    DRAFTS,
    FIRST,
    MAX_PIECE_TOKENS,
    REPLAYED,
    SLOT,
    SNAPSHOT,
    SNAPSHOT_AFTER,
    START,
    RowSnapshot,
    StateBatch,
    StateRow,
    lay_out,
    list_pieced,
)
from roseinfer.state.store import StateStore


class StateSlots:
    """Slot of each seat, the snapshots of the next step, and its rows with drafts.

    After a row with drafts, the slot has the state after the row's first token. The next row of the seat tells by its
    start how many drafts were right, and replays these.

    The store has one slot more than the scheduler knows. Seats that were given no slot share it, such as the seat of
    rows that only pad a batch.
    """

    def __init__(self, store: StateStore, max_num_seqs: int, copier: Copier | None = None) -> None:
        """copier: copies between `store` and host memory; None if plans have no loads and stores of states."""
        self.store = store
        self.copier = copier
        self.num_slots = store.num_slots - 1
        self._of_seat = np.full(max_num_seqs + 1, self.num_slots, np.int32)
        self._snapshots: tuple[StateSnapshot, ...] = ()
        self._known: dict[int, int] = {}  # by seat whose last row had drafts: tokens that its slot has consumed
        self._drafted: dict[int, tuple[int, int]] = {}  # by row of the plan: drafts, and replayed ones

    def apply(self, changes: StateChanges | None, rows: Sequence[Row] = ()) -> None:
        """Apply a plan's changes, before its rows run."""
        self._snapshots = ()
        if changes is not None:
            self._change(changes)
        self._drafted = {}
        for number, row in enumerate(rows):
            drafts = len(row.drafts)
            known = self._known.pop(row.seat, row.start) if self._known else row.start
            if drafts:
                self._known[row.seat] = row.start + 1
            if drafts or row.start > known:
                self._drafted[number] = (drafts, row.start - known)

    def _change(self, changes: StateChanges) -> None:
        for seat, slot in changes.slots:
            self._of_seat[seat] = slot
            self._known.pop(seat, None)
        for src, dst in changes.copies:
            self.store.copy(src, dst)
        self._snapshots = changes.snapshots

    def start_host_copies(self, changes: StateChanges | None) -> StepCopies | None:
        """Start a plan's loads and stores, after `apply`. Return None without any."""
        if changes is None or not (changes.loads or changes.stores):
            return None
        assert self.copier is not None, "there are no slots in host memory"
        return self.copier.start(changes.loads, changes.stores)

    def batch(
        self, order: Sequence[int], seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> StateBatch:
        """Return the states of a step's rows, which have these seats, starts and counts of tokens.

        order: the plan's number of each row.
        """
        return StateBatch.of(self.store, self._rows(order, seats, starts, counts), self._placed(order))

    def _rows(
        self, order: Sequence[int], seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> list[StateRow]:
        slots = self._of_seat[list(seats)].tolist()
        rows = [StateRow(*row) for row in zip(slots, starts, counts, strict=True)]
        for place, number in enumerate(order if self._drafted else ()):
            if number in self._drafted:
                rows[place] = StateRow(*rows[place][:3], *self._drafted[number])
        return rows

    def num_pieces(self, counts: Sequence[int]) -> int:
        """Return the most entries of `StateTables.pieces` that rows of so many tokens take."""
        pieces = sum(-(-count // MAX_PIECE_TOKENS) for count in counts if count > 1) + len(self._snapshots)
        return pieces - sum(1 for drafts, _ in self._drafted.values() if drafts)

    def write(
        self,
        rows: np.ndarray,
        pieces: np.ndarray,
        order: Sequence[int],
        seats: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        num_decodes: int,
    ) -> None:
        """Fill `StateTables.rows` and `StateTables.pieces` for these rows, of which the first ones have one token.

        Places after the rows and pieces have no tokens. The tables' sizes are those of a captured step.
        """
        snapshots = self._placed(order)
        end = len(seats)
        rows[:] = 0
        rows[SLOT, :num_decodes] = self._of_seat[list(seats[:num_decodes])]
        rows[START, :num_decodes] = starts[:num_decodes]
        rows[FIRST, :num_decodes] = np.arange(num_decodes)
        rows[COUNT, :num_decodes] = 1
        rows[SNAPSHOT, :num_decodes] = -1
        for row, tokens, slot in snapshots:
            if row < num_decodes:
                rows[SNAPSHOT, row], rows[SNAPSHOT_AFTER, row] = slot, tokens
        for place, number in enumerate(order[:num_decodes] if self._drafted else ()):
            rows[[DRAFTS, REPLAYED], place] = self._drafted.get(number, (0, 0))
        pieces[:] = 0
        if end == num_decodes:
            return
        of_chunks = (part[num_decodes:] for part in (order, seats, starts, counts))
        chunks = self._rows(*of_chunks)
        cuts = [RowSnapshot(row - num_decodes, *rest) for row, *rest in snapshots if row >= num_decodes]
        lines, found = lay_out(chunks, cuts)
        lines[FIRST] += num_decodes
        found[:, :2] += num_decodes  # the row's number and the index of its first token
        rows[:, num_decodes:end] = lines
        list_pieced(rows)
        pieces[: len(found)] = found

    def _placed(self, order: Sequence[int]) -> list[RowSnapshot]:
        """Return the step's snapshots by the place of their rows in the batch."""
        if not self._snapshots:
            return []
        places = {number: place for place, number in enumerate(order)}
        return [RowSnapshot(places[row], tokens, slot) for row, tokens, slot in self._snapshots]
