"""Residency of LoRA adapters: which ones are in slots of the device, in host memory, or only on disk.

A request with an adapter can start while that is in a slot. Otherwise it waits with `Cause.ADAPTER`, and blocks no
other request: the adapter is read into host memory in the background, and copied to a slot beside the rows of a step.

Wanted adapters are served in the order in which requests began to wait for them. One takes an empty slot, else the
least recently used slot without seated requests. If all have some for `DRAIN_AFTER_S`, the slot that probably becomes
free first drains: no request takes it any more until its adapter is replaced. One slot drains at a time, and not
sooner, because requests for its adapter wait meanwhile: while more adapters are in use than there are slots, a change
serves no more requests. An adapter whose requests wait keeps its slot for `MIN_TURN_S` at least.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from roseinfer.core.adapters import Adapter, AdapterFiles, AdapterLoad, AdapterPool, adapter_keys
from roseinfer.core.outputs import AdapterStats
from roseinfer.core.plan import StepPlan
from roseinfer.core.promise import MAX_DEVICE_ADAPTERS_COUNT, MAX_HOST_ADAPTERS_COUNT, Promise
from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause
from roseinfer.sched.host_adapters import HostAdapters
from roseinfer.sched.lengths.estimators import LengthEstimator

MIN_TURN_S = 0.5  # shorter turns would mostly copy adapters
DRAIN_AFTER_S = 2.0  # a request waits so long for a slot before one drains for it
WAITS_VALID_S = 0.05  # estimates of when slots become free are made again after this time
_STEP_GAIN_SHARE = 0.05  # weight of a step in the smoothed seconds per step


@dataclass(slots=True, eq=False)
class _Slot:
    """Slot of the device, and the seated requests that use it by id, ended ones in flight included.

    `loading`: a step in flight copies its adapter. `draining`: no further request takes it. `used`: number of its last
    use; a greater one is later. `since_s`: when its adapter came. `busy_since_s`: when a request took it that no other
    used.
    """

    number: int
    digest: str | None = None
    users: dict[str, Request] = field(default_factory=dict)
    loading: bool = False
    draining: bool = False
    used: int = 0
    since_s: float = 0.0
    busy_since_s: float = 0.0


class AdapterSlots:
    """Adapters of one scheduler's requests. `host`: their copies in host memory."""

    def __init__(
        self,
        pool: AdapterPool,
        files: AdapterFiles,
        host_bytes: int,
        pinned: Sequence[Adapter] = (),
        lengths: LengthEstimator | None = None,
    ) -> None:
        """`pinned`: adapters that stay in host memory. `lengths`: estimates of outputs, to foresee when slots become
        free; without any, an output takes all tokens that it may.
        """
        self.pool = pool
        self.host = HostAdapters(files, host_bytes, pinned)
        self._lengths = lengths
        self._slots = [_Slot(number) for number in range(pool.num_slots)]
        self._slot_of: dict[str, _Slot] = {}  # by digest, also while it is loaded
        self._joined: list[Request] = []  # since the last plan
        self._waiting: dict[str, dict[str, Request]] = {}  # by digest and id
        self._wanted: dict[str, None] = {}  # digests to load, in order
        self._draining: _Slot | None = None
        self._new_load: AdapterLoad | None = None  # of the step that is being planned
        self._uses = count(1)
        self._now_s = self._step_s = 0.0
        self._waits_s: list[float] = []  # seconds until each slot becomes free, rising
        self._waits_until_s = 0.0
        self._loads = self._evictions = 0

    def attach(self, loading_changed: Callable[[Request], None], fail: Callable[[Request, str, float], None]) -> None:
        """Set what is called after `request.loading` has changed, and what ends a request whose adapter is unusable."""
        self._loading_changed, self._fail = loading_changed, fail

    def is_usable(self, digest: str) -> bool:
        """True if a request with this adapter could start now."""
        slot = self._slot_of.get(digest)
        return slot is not None and not slot.loading and not slot.draining

    # --- requests -----------------------------------------------------------------------------------------------
    def join(self, request: Request) -> None:
        """Note a request that begins to wait, if it has an adapter."""
        if request.meta.adapter is not None:
            self._joined.append(request)

    def leave(self, request: Request) -> None:
        """Note that a request does not wait any more."""
        digest = digest_of(request)
        waiting = self._waiting.get(digest, {})
        if waiting.pop(request.request_id, None) is not None and not waiting:
            del self._waiting[digest]
            self._wanted.pop(digest, None)

    def seat(self, request: Request) -> int:
        """Let a request that starts use the slot of its adapter, and return its number; -1 without an adapter."""
        if request.meta.adapter is None:
            return -1
        digest = request.meta.adapter.digest
        assert self.is_usable(digest), "its adapter is not in a slot"
        self.leave(request)
        slot = self._slot_of[digest]
        if not slot.users:
            slot.busy_since_s = self._now_s
        slot.users[request.request_id] = request
        slot.used = next(self._uses)
        return slot.number

    def release(self, request: Request) -> None:
        """Note that a request has given up its seat."""
        if request.meta.adapter is not None:
            slot = self._slot_of[request.meta.adapter.digest]
            del slot.users[request.request_id]
            slot.used = next(self._uses)

    def recheck(self, request: Request) -> None:
        """Let a request whose prefix was loaded wait for its adapter, if that has lost its slot meanwhile."""
        digest = digest_of(request)
        if digest and request.loading is None and not self.is_usable(digest):
            request.loading = Cause.ADAPTER

    # --- plans --------------------------------------------------------------------------------------------------
    def begin(self, now_s: float) -> None:
        """Begin a plan: end requests whose adapter cannot be read, and choose what to read, load and replace."""
        self._now_s = now_s
        for failed in self.host.poll(self._is_needed):
            for request in list(self._waiting.get(failed.digest, {}).values()):
                adapter = request.meta.adapter
                if adapter is not None and adapter.path == failed.path:
                    self._fail(request, failed.error, now_s)
        self._place_joined()
        draining = self._draining
        if draining is not None and next(iter(self._wanted), draining.digest) == draining.digest:
            self._stop_draining(draining)
        is_next = True
        for digest in list(self._wanted):
            if digest in self._slot_of:
                continue  # its slot drains for one that is wanted longer
            adapter = next(iter(self._waiting[digest].values())).meta.adapter
            assert adapter is not None
            if digest not in self.host:
                self.host.want(adapter, self._is_needed, is_next)
            elif self._new_load is None:
                self._find_slot(digest)
            is_next = False

    def _is_needed(self, digest: str) -> bool:
        """True if the copy in host memory is about to be loaded."""
        return digest in self._wanted or (self._new_load is not None and self._new_load.digest == digest)

    def _place_joined(self) -> None:
        joined, self._joined = self._joined, []
        for request in joined:
            if request.status is not Status.WAITING:
                continue
            digest = digest_of(request)
            self._waiting.setdefault(digest, {})[request.request_id] = request
            if not self.is_usable(digest):
                self._block((request,))
                self._want(digest)

    def _want(self, digest: str) -> None:
        """Queue an adapter for a slot, unless one is about to hold it or no request waits for it."""
        slot = self._slot_of.get(digest)
        if (slot is None or slot.draining) and digest in self._waiting:
            self._wanted.setdefault(digest)

    def _find_slot(self, digest: str) -> None:
        """Begin to load an adapter that is in host memory, or let a slot drain."""
        free = [slot for slot in self._slots if self._is_replaceable(slot)]
        if free:
            slot = min(free, key=lambda slot: (slot.digest is not None, slot.digest in self._waiting, slot.used))
            self._begin_load(slot, digest)
        elif self._draining is None and self._now_s - self._wanted_since(digest) >= DRAIN_AFTER_S:
            taken = [slot for slot in self._slots if slot.users and not slot.loading and self._turn_left_s(slot) <= 0]
            if taken:
                self._drain(min(taken, key=self._drain_s))

    def _wanted_since(self, digest: str) -> float:
        return next(iter(self._waiting[digest].values())).arrival_s

    def _is_replaceable(self, slot: _Slot) -> bool:
        idle = not slot.users and not slot.loading
        return idle and (slot.draining or slot.digest not in self._waiting or self._turn_left_s(slot) <= 0)

    def _turn_left_s(self, slot: _Slot) -> float:
        return slot.since_s + MIN_TURN_S - self._now_s

    def _begin_load(self, slot: _Slot, digest: str) -> None:
        replaced = slot.digest
        if replaced is not None:
            del self._slot_of[replaced]
            self._evictions += 1
        if slot.draining:
            self._draining = None
        slot.digest, slot.loading, slot.draining, slot.since_s = digest, True, False, self._now_s
        self._slot_of[digest] = slot
        del self._wanted[digest]
        self._new_load = AdapterLoad(slot.number, digest)
        self._loads += 1
        self.host.use(digest)
        if replaced is not None:
            self._block(self._waiting.get(replaced, {}).values())
            self._want(replaced)

    def _drain(self, slot: _Slot) -> None:
        assert slot.digest is not None
        slot.draining, self._draining = True, slot
        self._block(self._waiting.get(slot.digest, {}).values())
        self._want(slot.digest)

    def _stop_draining(self, slot: _Slot) -> None:
        """Let requests use a slot again, because no other adapter is wanted, or none for longer."""
        assert slot.digest is not None
        slot.draining, slot.since_s, self._draining = False, self._now_s, None
        self._wanted.pop(slot.digest, None)
        self._unblock(slot.digest)

    def _block(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.loading is None:  # else it waits for its prefix; `recheck` follows
                request.loading = Cause.ADAPTER
                self._loading_changed(request)

    def _unblock(self, digest: str) -> None:
        for request in self._waiting.get(digest, {}).values():
            if request.loading is Cause.ADAPTER:
                request.loading = None
                self._loading_changed(request)

    @property
    def must_plan(self) -> bool:
        """True if a load is due even in a plan without rows."""
        return self._new_load is not None

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Return the loads of the plan."""
        load, self._new_load = self._new_load, None
        return () if load is None else (load,)

    def step_done(self, plan: StepPlan, duration_s: float) -> float:
        """Let requests use what a step has loaded. Return its duration as far as its rows determine it."""
        for load in plan.adapter_loads:
            slot = self._slots[load.slot]
            slot.loading, slot.since_s = False, self._now_s
            self._unblock(load.digest)
        if not plan.rows:
            return 0.0
        gain = _STEP_GAIN_SHARE if self._step_s else 1.0
        self._step_s += gain * (duration_s - self._step_s)
        return duration_s

    # --- seconds ------------------------------------------------------------------------------------------------
    def wait_s(self, adapter: Adapter) -> float:
        """Return the seconds until a request with this adapter could start: 0 if it is in a slot, else the time of its
        copy, of its read if it is on disk, and until a slot is free.
        """
        slot = self._slot_of.get(adapter.digest)
        load_s = adapter.num_bytes / self.pool.load_bytes_per_s
        if slot is not None and not slot.draining:
            return load_s if slot.loading else 0.0
        ahead = len(self._wanted)
        if adapter.digest in self._wanted:
            ahead = list(self._wanted).index(adapter.digest)
        return load_s + max(self.host.read_s(adapter), self.slot_wait_s(ahead))

    def slot_wait_s(self, ahead: int = 0) -> float:
        """Return the seconds until a slot is free for an adapter, with `ahead` others before it."""
        if self._now_s >= self._waits_until_s or not self._waits_s:
            self._waits_until_s = self._now_s + WAITS_VALID_S
            self._waits_s = sorted(map(self._free_s, self._slots))
        rounds, place = divmod(ahead, len(self._slots))
        return self._waits_s[place] + rounds * self._waits_s[-1]

    def _free_s(self, slot: _Slot) -> float:
        """Return the seconds until a slot is probably free: 0 if it can be replaced. One that is in use for longer than
        its requests take seems to get new ones until it drains.
        """
        if self._is_replaceable(slot):
            return 0.0
        drain_s = self._drain_s(slot)
        renewed = not slot.draining and self._now_s - slot.busy_since_s > drain_s
        return drain_s + DRAIN_AFTER_S if renewed else drain_s

    def _drain_s(self, slot: _Slot) -> float:
        """Return the seconds until the requests that use a slot have probably ended."""
        left = max((self._tokens_left(request) for request in slot.users.values()), default=0.0)
        return max(self._turn_left_s(slot), left * self._step_s)

    def _tokens_left(self, request: Request) -> float:
        if request.status is Status.FINISHED:
            return 0.0
        if self._lengths is None:
            return float(request.max_len - len(request.tokens))
        return self._lengths.left(request, max(1, request.num_outputs))

    # --- inspection ---------------------------------------------------------------------------------------------
    def publish(self, promise: Promise) -> Promise:
        """Return a promise that says where adapters are. One that is being loaded counts as loaded."""
        held = [slot for slot in self._slot_of.values() if not slot.draining]
        held.sort(key=lambda slot: -slot.used)
        return promise._replace(
            device_adapters=adapter_keys([slot.digest or "" for slot in held], MAX_DEVICE_ADAPTERS_COUNT),
            host_adapters=adapter_keys(self.host.digests, MAX_HOST_ADAPTERS_COUNT),
            adapter_load_s_per_byte=1 / self.pool.load_bytes_per_s,
            adapter_read_s_per_byte=self.host.read_s_per_byte,
            adapter_slot_wait_s=self.slot_wait_s(len(self._wanted)),
        )

    @property
    def num_waiting(self) -> int:
        """Count of the requests that wait for an adapter."""
        return sum(len(waiting) for digest, waiting in self._waiting.items() if not self.is_usable(digest))

    def stats(self) -> AdapterStats:
        return AdapterStats(
            sum(bool(slot.users) for slot in self._slots),
            self.pool.num_slots,
            self.host.num_bytes,
            self.num_waiting,
            self._loads,
            self._evictions,
            self.host.reads,
            self.host.failures,
            self.host.reads_s,
        )

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Raise AssertionError if slots and live requests disagree."""
        with_adapter = [request for request in requests if request.meta.adapter is not None]
        seated = sorted(request.request_id for request in with_adapter if request.seat is not None)
        assert seated == sorted(name for slot in self._slots for name in slot.users), "references of slots"
        held = {slot.digest: slot for slot in self._slots if slot.digest is not None}
        assert held == self._slot_of, "an adapter in two slots or none"
        for slot in self._slots:
            assert all(digest_of(request) == slot.digest for request in slot.users.values()), "another adapter's slot"
            assert slot.draining == (slot is self._draining) and not (slot.loading and slot.users), slot
        known = {id(r) for r in self._joined} | {id(r) for held in self._waiting.values() for r in held.values()}
        assert all(id(r) in known for r in with_adapter if r.status is Status.WAITING), "a waiting request is unknown"
        for digest, waiting in self._waiting.items():
            usable, slot_or_none = self.is_usable(digest), self._slot_of.get(digest)
            assert all(
                r.status is Status.WAITING and (r.loading is Cause.ADAPTER) <= (not usable) for r in waiting.values()
            )
            assert usable or all(request.loading is not None for request in waiting.values()), "it could start"
            assert (digest in self._wanted) == (slot_or_none is None or slot_or_none.draining), "it is not wanted"
        assert self._wanted.keys() <= self._waiting.keys(), "no request wants it"
        self.host.check_integrity()


def digest_of(request: Request) -> str:
    """Return the digest of a request's adapter; empty without one."""
    return "" if request.meta.adapter is None else request.meta.adapter.digest
