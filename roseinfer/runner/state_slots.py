"""Slots of recurrent states, as plans assign them to seats."""

from collections.abc import Sequence

import numpy as np

from roseinfer.core.plan import StateChanges, StateSnapshot
from roseinfer.state.batch import (
    COUNT,
    FIRST,
    MAX_PIECE_TOKENS,
    SLOT,
    SNAPSHOT,
    START,
    RowSnapshot,
    StateBatch,
    StateRow,
    lay_out,
)
from roseinfer.state.store import StateStore


class StateSlots:
    """Slot of each seat, and the snapshots of the next step.

    The store has one slot more than the scheduler knows. Seats that were given no slot share it, such as the seat of
    rows that only pad a batch.
    """

    def __init__(self, store: StateStore, max_num_seqs: int) -> None:
        self.store = store
        self.num_slots = store.num_slots - 1
        self._of_seat = np.full(max_num_seqs + 1, self.num_slots, np.int32)
        self._snapshots: tuple[StateSnapshot, ...] = ()

    def apply(self, changes: StateChanges | None) -> None:
        """Apply a plan's changes, before its rows run."""
        self._snapshots = ()
        if changes is None:
            return
        for seat, slot in changes.slots:
            self._of_seat[seat] = slot
        for src, dst in changes.copies:
            self.store.copy(src, dst)
        self._snapshots = changes.snapshots

    def batch(
        self, order: Sequence[int], seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> StateBatch:
        """Return the states of a step's rows, which have these seats, starts and counts of tokens.

        order: the plan's number of each row.
        """
        slots = self._of_seat[list(seats)].tolist()
        rows = [StateRow(*row) for row in zip(slots, starts, counts, strict=True)]
        return StateBatch.of(self.store, rows, self._placed(order))

    def num_pieces(self, counts: Sequence[int]) -> int:
        """Return the most entries of `StateTables.pieces` that rows of so many tokens take."""
        return sum(-(-count // MAX_PIECE_TOKENS) for count in counts if count > 1) + len(self._snapshots)

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
        for row, _, slot in snapshots:
            if row < num_decodes:
                rows[SNAPSHOT, row] = slot
        pieces[:] = 0
        if end == num_decodes:
            return
        slots = self._of_seat[list(seats[num_decodes:])].tolist()
        chunks = [StateRow(*row) for row in zip(slots, starts[num_decodes:], counts[num_decodes:], strict=True)]
        cuts = [RowSnapshot(row - num_decodes, *rest) for row, *rest in snapshots if row >= num_decodes]
        lines, found = lay_out(chunks, cuts)
        lines[FIRST] += num_decodes
        found[:, :2] += num_decodes  # the row's number and the index of its first token
        rows[:, num_decodes:end] = lines
        pieces[: len(found)] = found

    def _placed(self, order: Sequence[int]) -> list[RowSnapshot]:
        """Return the step's snapshots by the place of their rows in the batch."""
        if not self._snapshots:
            return []
        places = {number: place for place, number in enumerate(order)}
        return [RowSnapshot(places[row], tokens, slot) for row, tokens, slot in self._snapshots]
