"""Slots in host memory for snapshots of states, and the copies between them and a state group's slots."""

from collections.abc import Sequence

from roseinfer.core.plan import HostCopy
from roseinfer.kv.blocks import Chain
from roseinfer.kv.host import HostCache
from roseinfer.kv.snapshot_index import SnapshotIndex, StateLookup
from roseinfer.kv.states import StateGroup


class HostStates(HostCache):
    """`num_slots` host slots beside the slots of `states`. Copies name a slot where those of blocks name a block.

    A load fills a free slot of the group, where its snapshot is found when the load is done. `loaded`, `stored`: count
    of the copies that are done.
    """

    def __init__(self, num_slots: int, states: StateGroup, block_size: int) -> None:
        self.snapshots = SnapshotIndex(num_slots, block_size)
        super().__init__(num_slots, states.pool, states.index, self.snapshots)
        self._states = states
        self.loaded = self.stored = 0

    def find_longest(
        self, chain: Chain, tokens: Sequence[int], upto: int, before: StateLookup | None = None
    ) -> StateLookup:
        """Return the longest snapshot in host memory, as `SnapshotIndex.find_longest` does."""
        return self.snapshots.find_longest(chain, tokens, upto, before)

    @property
    def can_load(self) -> bool:
        """True if a slot is free for a load."""
        return self._states.pool.num_free > 0

    def load(self, host: int) -> HostCopy:
        """Begin to load a host slot, which is not `is_loading`. The caller has checked `can_load`."""
        slot = self._states.take_slot()
        (copy,) = self.begin_loads((host,), (slot,))
        self._states.release_slot(slot)  # the load has a reference of its own
        return copy

    def finish_loads(self, copies: Sequence[HostCopy]) -> None:
        """End these loads: their snapshots can be found."""
        super().finish_loads(copies)
        self.loaded += len(copies)
        for copy in copies:
            if self._states.index.holds(copy.block):
                self._states.record(copy.block, self.snapshots.positions[copy.host])

    def finish_stores(self, copies: Sequence[HostCopy]) -> None:
        """End these stores."""
        super().finish_stores(copies)
        self.stored += len(copies)
        for copy in copies:
            if self.index.holds(copy.host):
                self.snapshots.record(copy.host, self._states.index.positions[copy.block])
