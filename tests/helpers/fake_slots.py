"""Slots of recurrent states in plain Python, for the fake runner: a state is the fingerprint of all consumed tokens.

Every row checks that its slot has consumed exactly the tokens before its first one. So a wrong slot, a lost copy, a
snapshot at another position or a slot that somebody overwrote fails at once.
"""

from collections.abc import Mapping, Sequence

from roseinfer.core.plan import Row, StateChanges, StepPlan

JUNK = (-1, 0)


class FakeSlots:
    """Contents of slots as (number of consumed tokens, fingerprint), and the slot of each seat.

    A row with drafts consumes its first token only. It keeps the fingerprints of its drafts, of which the seat's next
    row consumes as many as were right before its own tokens.
    """

    def __init__(self, num_slots: int, num_host_slots: int = 0) -> None:
        self.slots = [JUNK] * num_slots
        self.host = [JUNK] * num_host_slots
        self._copied: dict[int, list[tuple[int, int]]] = {}  # by step: what its loads and stores read
        self._of_seat: dict[int, int] = {}
        self._drafts: dict[int, list[int]] = {}  # by slot: fingerprints after the drafts of its last row

    def apply(self, plan: StepPlan, prints: Mapping[int, Sequence[int]]) -> None:
        """Execute a plan. prints: by seat, the fingerprints of the tokens up to the end of the seat's row."""
        changes = plan.states or StateChanges()
        assert plan.states != StateChanges(), "no change is None"
        for seat in plan.released:
            slot = self._of_seat.pop(seat)
            if slot not in self._of_seat.values():
                self.slots[slot] = JUNK
                self._drafts.pop(slot, None)
        admitted = [new.seat for new in plan.admitted]
        assert [change.seat for change in changes.slots] == admitted, "each admitted request gets a slot"
        self._of_seat.update(changes.slots)
        live = list(self._of_seat.values())
        assert len(set(live)) == len(live), "two seats share a slot"
        self._copy(changes, {change.slot for change in changes.slots})
        self._check_snapshots(changes, set(live))
        self._begin_host_copies(plan.step, changes, set(live))
        for number, row in enumerate(plan.rows):
            self._advance(number, row, prints[row.seat], changes)

    def _copy(self, changes: StateChanges, new: set[int]) -> None:
        sources, targets = {copy.src for copy in changes.copies}, [copy.dst for copy in changes.copies]
        assert sources.isdisjoint(targets) and len(set(targets)) == len(targets)
        assert new.issuperset(targets), "only slots that begin to live are filled"
        held = [self.slots[copy.src] for copy in changes.copies]
        assert JUNK not in held, "what is copied was written"
        for slot in new:
            self._drafts.pop(slot, None)
        for copy, state in zip(changes.copies, held, strict=True):
            self.slots[copy.dst] = state

    def _begin_host_copies(self, step: int, changes: StateChanges, live: set[int]) -> None:
        """Hide what loads and stores write until the step is collected."""
        loaded, stored_to = [copy.block for copy in changes.loads], [copy.host for copy in changes.stores]
        stored = {copy.block for copy in changes.stores}
        assert len(set(loaded)) == len(loaded) and len(set(stored_to)) == len(stored_to), "written once"
        assert set(stored_to).isdisjoint(copy.host for copy in changes.loads)
        written = live.union(snapshot.slot for snapshot in changes.snapshots)
        assert written.isdisjoint(stored), "a slot is stored and written"
        assert written.union(stored, (copy.src for copy in changes.copies)).isdisjoint(loaded), "used while loaded"
        read = [*(self.host[copy.host] for copy in changes.loads), *(self.slots[copy.block] for copy in changes.stores)]
        assert JUNK not in read, "only what is there is copied"
        self._copied[step] = read
        for copy in changes.loads:
            self.slots[copy.block] = JUNK
        for copy in changes.stores:
            self.host[copy.host] = JUNK

    def end_host_copies(self, plan: StepPlan) -> None:
        """Complete the copies of a step that is collected."""
        changes, read = plan.states or StateChanges(), self._copied.pop(plan.step)
        for copy, state in zip(changes.loads, read[: len(changes.loads)], strict=True):
            assert (self.host[copy.host], self.slots[copy.block]) == (state, JUNK), "nobody writes either side"
            self.slots[copy.block] = state
        for copy, state in zip(changes.stores, read[len(changes.loads) :], strict=True):
            assert (self.slots[copy.block], self.host[copy.host]) == (state, JUNK), "nobody writes either side"
            self.host[copy.host] = state

    def _check_snapshots(self, changes: StateChanges, live: set[int]) -> None:
        slots = [snapshot.slot for snapshot in changes.snapshots]
        assert len(set(slots)) == len(slots) and live.isdisjoint(slots), "a snapshot is written to a slot in use"
        assert {copy.src for copy in changes.copies}.isdisjoint(slots)
        places = [(snapshot.row, snapshot.tokens) for snapshot in changes.snapshots]
        assert len(set(places)) == len(places), "one snapshot of a state is enough"

    def _advance(self, number: int, row: Row, prints: Sequence[int], changes: StateChanges) -> None:
        slot, start, end = self._of_seat[row.seat], row.start, row.start + row.count - len(row.drafts)
        consumed = self._replay(slot, start)
        if start:
            held = self.slots[slot]
            assert held == (start, prints[start - 1]), f"row {number} begins at {start}, and its state is {held}"
        for snapshot in changes.snapshots:
            if snapshot.row == number:
                position = start + snapshot.tokens
                assert consumed < position <= end, "the state is at that position in this row"
                self.slots[snapshot.slot] = (position, prints[position - 1])
        self.slots[slot] = (end, prints[end - 1])
        if row.drafts:
            self._drafts[slot] = list(prints[end : end + len(row.drafts)])

    def _replay(self, slot: int, start: int) -> int:
        """Consume the drafts before a row that were right. Return how many tokens the state had consumed before."""
        consumed, drafts = self.slots[slot][0] if start else 0, self._drafts.pop(slot, [])
        right = start - consumed
        if right and drafts:
            assert 0 < right <= len(drafts), "drafts that were right follow the state"
            self.slots[slot] = (start, drafts[right - 1])
        return consumed
