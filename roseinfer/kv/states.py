"""State group: slots that hold the recurrent states of running sequences, and snapshots of states at a position.

Each step overwrites a sequence's state. So a cached prefix can be continued only where a snapshot of the state was
taken, at a multiple of the block size. A snapshot is a slot without references, which an index finds by the key of the
prefix. It lasts until its slot is taken again. Slots are taken in the order of their snapshots' worth, by GreedyDual
(N. Young, "The k-server dual and loose competitiveness for paging", 1994): the tokens before the snapshot, plus the
worth of the last one that was overwritten when it was last used. Of equal snapshots the least recently used goes first.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from roseinfer.core.plan import SlotCopy
from roseinfer.core.runner import StatePool
from roseinfer.kv.blocks import BlockPool, Chain, IndexEntry
from roseinfer.kv.snapshot_index import SnapshotIndex, StateLookup

# Share of the slots that sequences leave to snapshots, so that prefixes are found when no other slot is free.
SNAPSHOT_RESERVE_SHARE = 0.25
# Sequences that have begun from a snapshot where further ones probably will.
MIN_SHARED_USES = 2


class SeatedState(NamedTuple):
    """Slot of a sequence that takes a seat, and the copy that fills it; None if nothing has to be copied."""

    slot: int
    copy: SlotCopy | None


class _Held(NamedTuple):
    position: int
    slot: int


class StateGroup:
    """States of all live sequences over one pool of slots.

    Misuse (an unknown sequence, no room) asserts. A slot is referenced while a sequence that has a seat lives in it,
    while a step in flight copies from it or writes a snapshot to it, and while it is held for the samples of a request.
    """

    def __init__(self, pool: StatePool, block_size: int, reserved: int = 0) -> None:
        """reserved: slots that sequences leave to snapshots."""
        self.num_slots, self.slot_bytes = pool.num_slots, pool.slot_bytes
        self._reserved = reserved
        self.block_size = block_size
        self.index = SnapshotIndex(self.num_slots, block_size)
        self.pool = BlockPool(self.num_slots, self.index.remove)
        self._uses = [0] * self.num_slots  # sequences that began from the snapshot in a slot
        self._worth = [0] * self.num_slots  # of the snapshot in a slot; 0 = it is overwritten before others
        self._last_worth = 0  # of the last snapshot with any that was overwritten
        self._live: dict[str, int] = {}  # slot by sequence
        self._copied: list[int] = []  # sources of copies in flight
        self._written: set[int] = set()  # slots of snapshots in flight
        self._held: dict[str, _Held] = {}  # by the id of sample 0

    # --- size ---------------------------------------------------------------------------------------------------
    @property
    def num_free(self) -> int:
        """Return the number of slots that have no owner or are held for samples, those of snapshots included."""
        refs = self.pool.refs
        return self.pool.num_free + sum([refs[held.slot] == 1 for held in self._held.values()])

    @property
    def num_free_to_start(self) -> int:
        """Return the number of slots that sequences which start may take."""
        return max(0, min(self.num_free, self.num_slots - self._reserved - len(self._live)))

    @property
    def num_live(self) -> int:
        """Return the number of sequences that have a slot."""
        return len(self._live)

    @property
    def num_snapshots(self) -> int:
        """Return the number of snapshots that can be found."""
        return len(self.index)

    # --- prefixes -----------------------------------------------------------------------------------------------
    def look_up(self, chain: Chain, tokens: Sequence[int], upto: int, before: StateLookup | None = None) -> StateLookup:
        """Return the longest snapshot of a prefix, as `SnapshotIndex.find_longest` does."""
        return self.index.find_longest(chain, tokens, upto, before)

    def holds(self, chain: Chain, tokens: Sequence[int], position: int) -> bool:
        """True if there is a snapshot of a sequence at this multiple of the block size."""
        return self._find(chain, tokens, position) is not None

    def _find(self, chain: Chain, tokens: Sequence[int], position: int) -> int | None:
        if position % self.block_size or not position:
            return None
        return self.index.find(chain.entry(tokens, position // self.block_size - 1))

    # --- slots of sequences -------------------------------------------------------------------------------------
    def seat(self, sequence_id: str, chain: Chain, tokens: Sequence[int], start: int, family: str) -> SeatedState:
        """Give a sequence a slot with its state after `start` tokens, of which there is a snapshot unless `start` is 0.

        `family`: id of the sample 0 whose held state may be used. The caller has checked `num_free`. If the snapshot's
        slot is the last free one, the sequence takes it over. Else it is copied, and referenced until `copies_done`.
        """
        assert sequence_id not in self._live, f"{sequence_id!r} has a slot already"
        source = self._find(chain, tokens, start)
        if source is None and start:
            held = self._held.get(family)
            assert held is not None and held.position == start, f"there is no state after {start} tokens"
            source = held.slot
        if not self.pool.num_free:
            self._release_held(family)
        if source is not None and self.pool.num_free == 1 and self.pool.refs[source] == 0:
            self.pool.share(source)
            self.index.remove(source)
            self._live[sequence_id] = source
            return SeatedState(source, None)
        if source is not None:
            self.pool.share(source)
            self._uses[source] += 1
        slot = self.take_slot()
        self._live[sequence_id] = slot
        if source is None:
            return SeatedState(slot, None)
        self._worth[source] = self._last_worth + start
        self._copied.append(source)
        return SeatedState(slot, SlotCopy(source, slot))

    def copies_done(self, copies: Iterable[SlotCopy]) -> None:
        """Release the sources of these copies, whose step is complete."""
        for copy in copies:
            self._copied.remove(copy.src)
            self.release_slot(copy.src)

    def release(self, sequence_id: str) -> None:
        """Release the slot of a sequence that no submitted step names, if it has one."""
        slot = self._live.pop(sequence_id, None)
        if slot is not None:
            self.release_slot(slot)

    # --- snapshots ----------------------------------------------------------------------------------------------
    def begin_snapshot(self, position: int, *, rolling: bool = False) -> int | None:
        """Return a slot for a snapshot that a step writes; None if each free slot has a snapshot that is worth more."""
        if not self.pool.num_free:
            return None
        worth = self._last_worth + position
        if self._worth_in(self._next()) > worth:
            if not rolling:
                self._last_worth = worth  # as if it were overwritten at once, so that the others are in time
            return None
        slot = self.take_slot()
        self._written.add(slot)
        return slot

    def finish_snapshot(
        self, slot: int, entry: IndexEntry | None, position: int, expected_uses: int = 0, *, rolling: bool = False
    ) -> bool:
        """End a snapshot, whose step is complete. Return True if it can be found now.

        `entry`: the full block before `position`; None if the snapshot must not be found. `expected_uses`: see
        `supersede`. `rolling`: it is overwritten before others until `settle`.
        """
        self._written.remove(slot)
        if entry is not None and self.index.block_of(entry.key) is None:
            self.index.insert(slot, entry)
            self.record(slot, position)
            self._uses[slot] = expected_uses
            if rolling:
                self._worth[slot] = 0
        found = self.index.holds(slot)
        self.release_slot(slot)
        return found

    def record(self, slot: int, position: int) -> None:
        """Record that the index has a new snapshot in `slot`, after `position` tokens."""
        self.index.record(slot, position)
        self._uses[slot] = 0
        self._worth[slot] = self._last_worth + position

    def drop(self, slot: int, entry: IndexEntry) -> None:
        """Forget the snapshot `entry` if it is still in `slot`, which is then the next to be taken."""
        if self.index.full_entry(slot) is entry:
            self._drop(slot)

    def settle(self, slot: int, entry: IndexEntry) -> None:
        """Give the snapshot `entry`, if it is still in `slot`, the worth of one that is not rolling."""
        if self.index.full_entry(slot) is entry:
            self._worth[slot] = self._last_worth + self.index.positions[slot]
            self.pool.share(slot)
            self.release_slot(slot)

    def supersede(self, chain: Chain, position: int) -> None:
        """Let the snapshots of a sequence before `position`, where it has a newer one, be overwritten before others.

        A snapshot that several sequences have begun from, or are expected to, is probably where further ones will.
        """
        for key in chain.keys[: position // self.block_size - 1]:
            slot = self.index.block_of(key)
            if slot is not None and self._uses[slot] < MIN_SHARED_USES and not self.pool.refs[slot]:
                self._worth[slot] = 0
                self.pool.share(slot)
                self.release_slot(slot)

    def invalidate(self, chain: Chain) -> None:
        """Forget all snapshots of a sequence, because it failed."""
        for key in chain.keys:
            slot = self.index.block_of(key)
            if slot is not None:
                self._drop(slot)

    def next_overwritten(self, count: int) -> list[int]:
        """Return up to `count` free slots in the order in which they will be taken, of those with a worth."""
        free = sorted(self.pool.walk_free(), key=self._worth_in)[:count]
        return [slot for slot in free if self._worth_in(slot)]

    def take_slot(self) -> int:
        """Take a free slot, whose snapshot is forgotten. The caller has checked `pool.num_free`, and releases it."""
        slot = self._next()
        self._last_worth = max(self._last_worth, self._worth_in(slot))
        self.pool.share(slot)
        self.index.remove(slot)
        return slot

    def release_slot(self, slot: int) -> None:
        """Drop a reference to a slot."""
        if self.index.holds(slot) and not self._worth[slot]:
            self.pool.release_early((slot,))
        else:
            self.pool.release((slot,), self.index.holds)

    # --- states for the samples of a request ----------------------------------------------------------------------
    def hold(self, family: str, position: int, slot: int) -> None:
        """Keep a slot, which has a state after the first `position` tokens, for the samples that continue there.

        It is released by `release_held`, or when no other slot is left for a sequence.
        """
        self.release_held(family)
        self.pool.share(slot)
        self._held[family] = _Held(position, slot)

    def held_position(self, family: str) -> int | None:
        """Return the position of the state that is held for the samples of a request; None without one."""
        held = self._held.get(family)
        return None if held is None else held.position

    def release_held(self, family: str) -> None:
        """Release the state that is held for the samples of a request, if there is one."""
        held = self._held.pop(family, None)
        if held is not None:
            self.release_slot(held.slot)

    def _release_held(self, last: str) -> None:
        """Release held slots, the oldest first and that of family `last` last, until one is free."""
        for family in sorted(self._held, key=lambda family: family == last):
            self.release_held(family)
            if self.pool.num_free:
                return
        raise AssertionError("the caller checks num_free")

    # --- inside -------------------------------------------------------------------------------------------------
    def _next(self) -> int:
        """Return the free slot that is taken next: one without a snapshot, or else that with the least worth."""
        (first,) = self.pool.next_free(1)
        return first if not self._worth_in(first) else min(self.pool.walk_free(), key=self._worth_in)

    def _worth_in(self, slot: int) -> int:
        """Return the worth of the snapshot in a slot; 0 without one."""
        return self._worth[slot] if self.index.holds(slot) else 0

    def _drop(self, slot: int) -> None:
        self.index.remove(slot)
        self.pool.share(slot)
        self.release_slot(slot)

    def audit(self, piece: int, others: Iterable[int] = ()) -> Iterator[None]:
        """Raise AssertionError unless every reference has exactly one owner; pause every `piece` slots.

        `others`: slots that copies from and to host memory reference.
        """
        owners = [0] * self.num_slots
        held = [held.slot for held in self._held.values()]
        for slot in (*self._live.values(), *self._copied, *self._written, *held, *others):
            owners[slot] += 1
        assert owners == self.pool.refs, "reference counts of slots and their owners disagree"
        for slot in (*self._live.values(), *self._written):
            assert owners[slot] == 1 and not self.index.holds(slot), f"slot {slot} is written and used otherwise"
        free = sum(1 for _ in self.pool.walk_free())
        assert free == self.pool.num_free == owners.count(0), "slots: free + owned != total"
        yield from self.index.audit(piece)
