"""Slots of recurrent states in plain Python, for the fake runner: a state is the fingerprint of all consumed tokens.

Every row checks that its slot has consumed exactly the tokens before its first one. So a wrong slot, a lost copy, a
snapshot at another position or a slot that somebody overwrote fails at once.
"""

from collections.abc import Mapping, Sequence

from roseinfer.core.plan import StateChanges, StepPlan

JUNK = (-1, 0)


class FakeSlots:
    """Contents of slots as (number of consumed tokens, fingerprint), and the slot of each seat."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [JUNK] * num_slots
        self._of_seat: dict[int, int] = {}

    def apply(self, plan: StepPlan, prints: Mapping[int, Sequence[int]]) -> None:
        """Execute a plan. prints: by seat, the fingerprints of the tokens up to the end of the seat's row."""
        changes = plan.states or StateChanges()
        assert plan.states != StateChanges(), "no change is None"
        for seat in plan.released:
            slot = self._of_seat.pop(seat)
            if slot not in self._of_seat.values():
                self.slots[slot] = JUNK
        admitted = [new.seat for new in plan.admitted]
        assert [change.seat for change in changes.slots] == admitted, "each admitted request gets a slot"
        self._of_seat.update(changes.slots)
        live = list(self._of_seat.values())
        assert len(set(live)) == len(live), "two seats share a slot"
        self._copy(changes, {change.slot for change in changes.slots})
        self._check_snapshots(changes, set(live))
        for number, row in enumerate(plan.rows):
            self._advance(
                number, self._of_seat[row.seat], (row.start, row.start + row.count), prints[row.seat], changes
            )

    def _copy(self, changes: StateChanges, new: set[int]) -> None:
        sources, targets = {copy.src for copy in changes.copies}, [copy.dst for copy in changes.copies]
        assert sources.isdisjoint(targets) and len(set(targets)) == len(targets)
        assert new.issuperset(targets), "only slots that begin to live are filled"
        held = [self.slots[copy.src] for copy in changes.copies]
        assert JUNK not in held, "what is copied was written"
        for copy, state in zip(changes.copies, held, strict=True):
            self.slots[copy.dst] = state

    def _check_snapshots(self, changes: StateChanges, live: set[int]) -> None:
        slots = [snapshot.slot for snapshot in changes.snapshots]
        assert len(set(slots)) == len(slots) and live.isdisjoint(slots), "a snapshot is written to a slot in use"
        assert {copy.src for copy in changes.copies}.isdisjoint(slots)
        places = [(snapshot.row, snapshot.tokens) for snapshot in changes.snapshots]
        assert len(set(places)) == len(places), "one snapshot of a state is enough"

    def _advance(
        self, number: int, slot: int, span: tuple[int, int], prints: Sequence[int], changes: StateChanges
    ) -> None:
        start, end = span
        if start:
            held = self.slots[slot]
            assert held == (start, prints[start - 1]), f"row {number} begins at {start}, and its state is {held}"
        for snapshot in changes.snapshots:
            if snapshot.row == number:
                assert 0 < snapshot.tokens <= end - start
                position = start + snapshot.tokens
                self.slots[snapshot.slot] = (position, prints[position - 1])
        self.slots[slot] = (end, prints[end - 1])
