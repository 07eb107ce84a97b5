"""Offload of recurrent states: which snapshots are stored in host memory, and which are loaded for a request.

A snapshot is stored when it would be overwritten soon, if it is worth anything, and the last one of a request when that
is preempted. It is loaded beside the KV blocks before it into a slot for snapshots, where its request finds it.
"""

from collections.abc import Sequence

from roseinfer.core.plan import HostCopy, StateChanges
from roseinfer.core.request import Request
from roseinfer.kv.host_states import HostStates
from roseinfer.kv.manager import KvManager
from roseinfer.kv.states import StateGroup

# Share of the slots whose snapshots are stored before they are overwritten, and the least number.
STORE_AHEAD_SHARE = 0.25
MIN_STORE_AHEAD_COUNT = 2


class StateOffload:
    """Loads and stores of states of one Scheduler."""

    def __init__(self, kv: KvManager, states: StateGroup, host: HostStates) -> None:
        self._kv, self._states, self._host = kv, states, host
        self._ahead = max(MIN_STORE_AHEAD_COUNT, int(states.num_slots * STORE_AHEAD_SHARE))
        self._seen = 0  # changes of the group's index when all candidates were last stored
        self._new_stores: list[HostCopy] = []  # stores that the next plan must carry

    @property
    def must_plan(self) -> bool:
        """True if stores are due even in a plan without rows."""
        return bool(self._new_stores)

    def is_loading(self, host_slots: Sequence[int]) -> bool:
        """True if one of these slots is being loaded for another request."""
        return self._host.is_loading(host_slots)

    def load(self, host_slots: Sequence[int]) -> HostCopy | None:
        """Begin to load the slot of a hit in host memory, if it has one."""
        if not host_slots:
            return None
        self._host.touch_host(host_slots[0])
        return self._host.load(host_slots[0])

    def cancel_load(self, copy: HostCopy) -> None:
        """Drop a load that is in no plan."""
        self._host.cancel_loads([copy])

    def store_last(self, request: Request) -> None:
        """Begin to store the last snapshot of a preempted request."""
        chain = self._kv.chain(request.request_id)
        last = self._states.look_up(chain, request.tokens, min(request.computed, len(request.tokens)))
        if last.tokens:
            self._store(last.slot)

    @property
    def has_candidates(self) -> bool:
        """True if a snapshot that was not examined yet may be overwritten soon."""
        return self._seen != self._states.index.changes

    def store_next(self, room: int) -> None:
        """Begin to store the snapshots that will be overwritten next, as far as a step with `room` copies can."""
        # A slot that is being stored cannot be taken, so leave those that requests may start in.
        reserved = self._states.pool.num_free - self._states.num_free_to_start
        room = min(room - len(self._new_stores), reserved)
        for slot in self._states.next_overwritten(self._ahead):
            if self._host.should_store(slot):
                if room <= 0:
                    return
                room -= 1
                self._store(slot)
        self._seen = self._states.index.changes

    def take_stores(self) -> list[HostCopy]:
        """Return the stores that the next plan must carry."""
        stores, self._new_stores = self._new_stores, []
        return stores

    def _store(self, slot: int) -> None:
        copy = self._host.begin_store(slot)
        if copy is not None:
            self._new_stores.append(copy)

    def done(self, changes: StateChanges) -> None:
        """End the copies of a step that is done."""
        if changes.stores:
            self._host.finish_stores(changes.stores)
        if changes.loads:
            self._host.finish_loads(changes.loads)
