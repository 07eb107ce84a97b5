"""Residency of LoRA adapters: which ones are in slots of the device, in host memory, or only on disk.

A request with an adapter can start while that is in a slot. Otherwise it waits with `Cause.ADAPTER`, and blocks no
other request: the adapter is read into host memory in the background, and copied to a slot beside the rows of a step.

Wanted adapters are served in the order in which requests began to wait for them. One takes an empty slot, else the
least recently used slot without seated requests, else a share of a slot if steps are fast enough (`adapter_turns`).

Sharers of a slot take turns of `MIN_TURN_STEPS`. Then the slot closes: no further row uses it, and when those of the
submitted steps are done, the adapter that was absent for longest is loaded, before any other adapter. One slot closes
at a time, because a step loads one adapter. An adapter whose requests only wait has a turn if there is a
seat, or once they have waited for `DRAIN_AFTER_S`. If none of them starts in a turn, the running requests of other
sharers keep the slot until a request has given up its seat and blocks, or for `DRAIN_AFTER_S`.

If a request waits for a slot for `DRAIN_AFTER_S`, the adapter that probably becomes unused first drains: no request
takes it any more until it is replaced. One drains at a time, and not sooner, because requests for it wait meanwhile:
while more adapters are in use than there is room for, a change serves no more requests. An adapter whose requests wait
keeps its slot for `MIN_RESIDENCE_S` at least.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from math import inf

from roseinfer.core.adapters import Adapter, AdapterFiles, AdapterLoad, AdapterPool, adapter_keys
from roseinfer.core.outputs import AdapterStats
from roseinfer.core.plan import StepPlan
from roseinfer.core.promise import MAX_DEVICE_ADAPTERS_COUNT, MAX_HOST_ADAPTERS_COUNT, Promise
from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause
from roseinfer.sched.adapter_turns import MIN_TURN_STEPS, Sharer, Slot, sharers_limit, sitting_out
from roseinfer.sched.host_adapters import HostAdapters
from roseinfer.sched.lengths.estimators import LengthEstimator

MIN_RESIDENCE_S = 0.5  # shorter ones would mostly copy adapters
DRAIN_AFTER_S = 2.0  # a request waits so long for a slot before one drains for it
WAITS_VALID_S = 0.05  # estimates of when slots become free, and how many may share one, are made again after this time
_STEP_GAIN_SHARE = 0.05  # weight of a step in the smoothed seconds per step


class AdapterSlots:
    """Adapters of one scheduler's requests. `host`: their copies in host memory. `sitting_out`: seated requests that no
    row of the plan may compute.
    """

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
        self.sitting_out: Collection[Request] = ()
        self._slots = [Slot(number) for number in range(pool.num_slots)]
        self._sharers: dict[str, Sharer] = {}  # by digest
        self._joined: list[Request] = []  # since the last plan
        self._waiting: dict[str, dict[str, Request]] = {}  # by digest and id
        self._wanted: dict[str, None] = {}  # digests to load, in order
        self._draining: Sharer | None = None
        self._closing: Slot | None = None
        self._new_load: AdapterLoad | None = None  # of the step that is being planned
        self._uses = count(1)
        self._now_s = self._step_s = 0.0
        self._released_s = 0.0  # when a request last gave up its seat
        self._has_seat = False  # for a request that starts
        self._waits_s: list[float] = []  # seconds until each slot becomes free, rising
        self._waits_until_s = self._limit_until_s = 0.0
        self._limit = 1  # adapters that may share a slot
        self._turn_steps = MIN_TURN_STEPS
        self._plans = 0
        self._loads = self._evictions = 0

    def attach(self, loading_changed: Callable[[Request], None], fail: Callable[[Request, str, float], None]) -> None:
        """Set what is called after `request.loading` has changed, and what ends a request whose adapter is unusable."""
        self._loading_changed, self._fail = loading_changed, fail

    def is_usable(self, digest: str) -> bool:
        """True if a request with this adapter could start now."""
        sharer = self._sharers.get(digest)
        return sharer is not None and not sharer.draining and sharer.slot.serves(sharer)

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
        sharer = self._sharers[digest]
        if not sharer.users:
            sharer.busy_since_s = self._now_s
        sharer.users[request.request_id] = request
        sharer.used = next(self._uses)
        sharer.tried_s = -inf
        return sharer.slot.number

    def release(self, request: Request) -> None:
        """Note that a request has given up its seat."""
        self._released_s = self._now_s
        if request.meta.adapter is not None:
            sharer = self._sharers[request.meta.adapter.digest]
            del sharer.users[request.request_id]
            sharer.used = next(self._uses)

    def recheck(self, request: Request) -> None:
        """Let a request whose prefix was loaded wait for its adapter, if that has lost its slot meanwhile."""
        digest = digest_of(request)
        if digest and request.loading is None and not self.is_usable(digest):
            request.loading = Cause.ADAPTER

    # --- plans --------------------------------------------------------------------------------------------------
    def begin(self, now_s: float, free_seats: int) -> None:
        """Begin a plan: end requests whose adapter cannot be read, and choose what to read, load and replace."""
        self._now_s = now_s
        self._has_seat = free_seats > 0
        self._plans += 1
        for failed in self.host.poll(self._is_needed):
            for request in list(self._waiting.get(failed.digest, {}).values()):
                adapter = request.meta.adapter
                if adapter is not None and adapter.path == failed.path:
                    self._fail(request, failed.error, now_s)
        self._place_joined()
        if self._closing is not None:
            self._change(self._closing)
        draining = self._draining
        if draining is not None and next(iter(self._wanted), draining.digest) == draining.digest:
            self._stop_draining(draining)
        is_next = True
        for digest in list(self._wanted):
            if digest in self._sharers:
                continue  # it drains for one that is wanted longer
            adapter = next(iter(self._waiting[digest].values())).meta.adapter
            assert adapter is not None
            if digest not in self.host:
                self.host.want(adapter, self._is_needed, is_next)
            elif self._new_load is None:
                self._find_slot(digest)
            is_next = False
        self._take_turns()

    def able(self, rows: Iterable[Request]) -> Iterable[Request]:
        """Return those of the rows that the plan may compute."""
        return [request for request in rows if request not in self.sitting_out] if self.sitting_out else rows

    def _is_needed(self, digest: str) -> bool:
        """True if the copy in host memory is about to be loaded, or its adapter shares a slot."""
        sharer = self._sharers.get(digest)
        if digest in self._wanted or (sharer is not None and sharer.slot.absent):
            return True
        return self._new_load is not None and self._new_load.digest == digest

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
        """Queue an adapter for a slot, unless it has one or no request waits for it."""
        sharer = self._sharers.get(digest)
        if (sharer is None or sharer.draining) and digest in self._waiting:
            self._wanted.setdefault(digest)

    def _find_slot(self, digest: str) -> None:
        """Let an adapter that is in host memory have a slot or share one, or let another one drain."""
        free = [slot for slot in self._slots if self._is_replaceable(slot)]
        if free:
            slot = min(free, key=self._replacement_key)
            for sharer in tuple(slot.sharers):
                self._drop(sharer)
            self._load(self._share(slot, digest))
            return
        self._update_limit()
        roomy = [slot for slot in self._slots if self._has_room(slot)]
        if roomy:
            self._share(min(roomy, key=lambda slot: len(slot.sharers)), digest)
        elif self._draining is None and self._now_s - self._wanted_since(digest) >= DRAIN_AFTER_S:
            taken = [each for each in self._sharers.values() if each.users and self._residence_left_s(each) <= 0]
            if taken:
                self._drain(min(taken, key=self._drain_s))

    def _replacement_key(self, slot: Slot) -> tuple[bool, bool, int]:
        current = slot.current
        return (False, False, 0) if current is None else (True, current.digest in self._waiting, current.used)

    def _update_limit(self) -> None:
        """Decide at intervals how many adapters may share a slot."""
        if self._now_s >= self._limit_until_s:
            self._limit_until_s = self._now_s + WAITS_VALID_S
            seated = [request for sharer in self._sharers.values() for request in sharer.users.values()]
            waiting = [request for waiting in self._waiting.values() for request in waiting.values()]
            self._limit = sharers_limit(seated + waiting, self._step_s)

    def _has_room(self, slot: Slot) -> bool:
        """True if one more adapter may share a slot; the copies of all of them have to stay in host memory."""
        fits = len(slot.sharers) < self._limit and not self.host.is_over_budget
        return fits and all(sharer.digest in self.host for sharer in slot.sharers)

    def _wanted_since(self, digest: str) -> float:
        return next(iter(self._waiting[digest].values())).arrival_s

    def _is_replaceable(self, slot: Slot) -> bool:
        if slot.loading or slot.is_used:
            return False
        return not any(self._is_active(sharer) and self._residence_left_s(sharer) > 0 for sharer in slot.sharers)

    def _is_active(self, sharer: Sharer) -> bool:
        """True if requests use an adapter, or may take it."""
        return bool(sharer.users) or (not sharer.draining and sharer.digest in self._waiting)

    def _residence_left_s(self, sharer: Sharer) -> float:
        return sharer.since_s + MIN_RESIDENCE_S - self._now_s

    def _share(self, slot: Slot, digest: str) -> Sharer:
        """Give an adapter a slot, alone or with others."""
        sharer = self._sharers[digest] = Sharer(digest, slot, self._now_s, self._plans)
        slot.sharers.append(sharer)
        del self._wanted[digest]
        return sharer

    def _drop(self, sharer: Sharer) -> None:
        """Take its slot from an adapter that no seated request uses."""
        sharer.slot.sharers.remove(sharer)
        del self._sharers[sharer.digest]
        if sharer is self._draining:
            self._draining = None
        self._block(self._waiting.get(sharer.digest, {}).values())
        self._want(sharer.digest)

    def _load(self, sharer: Sharer) -> None:
        """Begin to copy an adapter to its slot, which no submitted row uses."""
        slot = sharer.slot
        self._evictions += slot.current is not None
        slot.current, slot.loading = sharer, True
        if not sharer.users:
            sharer.tried_s = self._now_s
        if slot.closing:
            slot.closing, self._closing = False, None
        self._new_load = AdapterLoad(slot.number, sharer.digest)
        self._loads += 1
        self.host.use(sharer.digest)

    def _drain(self, sharer: Sharer) -> None:
        sharer.draining, self._draining = True, sharer
        self._block(self._waiting.get(sharer.digest, {}).values())
        self._want(sharer.digest)

    def _stop_draining(self, sharer: Sharer) -> None:
        """Let requests use an adapter again, because no other one is wanted, or none for longer."""
        sharer.draining, sharer.since_s, self._draining = False, self._now_s, None
        self._wanted.pop(sharer.digest, None)
        self._unblock(sharer.digest)

    # --- turns --------------------------------------------------------------------------------------------------
    def _take_turns(self) -> None:
        """Let the next adapters have the slots that several share."""
        shared = [slot for slot in self._slots if slot.closing or len(slot.sharers) > 1]
        self._turn_steps = max(MIN_TURN_STEPS, 2 * len(shared))  # other adapters may have every second load
        for slot in shared:
            for sharer in slot.absent:
                if not self._is_active(sharer):
                    self._drop(sharer)
        if self._closing is None:
            over = [slot for slot in shared if self._is_turn_over(slot)]
            if over:
                self._close(min(over, key=lambda slot: slot.since))
        if self._closing is not None:
            self._change(self._closing)
        self.sitting_out = sitting_out(self._slots) if shared or self.sitting_out else ()

    @property
    def _turn_s(self) -> float:
        return self._turn_steps * self._step_s

    def _is_turn_over(self, slot: Slot) -> bool:
        current = slot.current
        if slot.loading or current is None or not any(map(self._needs_turn, slot.absent)):
            return False
        return not self._needs_turn(current) or self._plans >= slot.since + self._turn_steps

    def _needs_turn(self, sharer: Sharer) -> bool:
        """True if rows use an adapter, or requests could start with it: a seat is free, or they have waited long."""
        if sharer.users:
            return True
        if not self._is_active(sharer) or self._yields(sharer):
            return False
        return self._has_seat or self._now_s - self._wanted_since(sharer.digest) >= DRAIN_AFTER_S

    def _yields(self, sharer: Sharer) -> bool:
        """True if rows of other adapters have the slot, because no request could start in this adapter's last turn."""
        if sharer is sharer.slot.current or not sharer.slot.is_used:
            return False
        return self._released_s <= sharer.tried_s and self._now_s < sharer.tried_s + DRAIN_AFTER_S

    def _close(self, slot: Slot) -> None:
        assert slot.current is not None
        slot.closing, self._closing = True, slot
        self._block(self._waiting.get(slot.current.digest, {}).values())

    def _change(self, slot: Slot) -> None:
        """Load the next sharer of a closing slot, once no submitted row uses it; reopen the slot if there is none."""
        former = slot.current
        assert former is not None
        next_ones = [sharer for sharer in slot.absent if self._needs_turn(sharer)]
        if not next_ones:
            slot.closing, self._closing = False, None
            self._unblock(former.digest)
        elif self._new_load is None and not slot.in_flight:
            self._load(min(next_ones, key=lambda sharer: sharer.left))
            former.left = self._plans
            if not self._is_active(former):
                self._drop(former)

    # --- waiting requests ---------------------------------------------------------------------------------------
    def _block(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.loading is None:  # else it waits for its prefix; `recheck` follows
                request.loading = Cause.ADAPTER
                self._loading_changed(request)

    def _unblock(self, digest: str) -> None:
        if not self.is_usable(digest):
            return
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
            slot.loading, slot.since = False, self._plans
            self._unblock(load.digest)
        if not plan.rows:
            return 0.0
        gain = _STEP_GAIN_SHARE if self._step_s else 1.0
        self._step_s += gain * (duration_s - self._step_s)
        return duration_s

    # --- seconds ------------------------------------------------------------------------------------------------
    def wait_s(self, adapter: Adapter) -> float:
        """Return the seconds until a request with this adapter could start: 0 if it is in a slot, else the time of its
        copy, of its read if it is on disk, and until it has a slot or its turn.
        """
        sharer = self._sharers.get(adapter.digest)
        load_s = adapter.num_bytes / self.pool.load_bytes_per_s
        if sharer is not None and not sharer.draining:
            slot = sharer.slot
            if slot.current is sharer and not slot.closing:
                return load_s if slot.loading else 0.0
            return load_s + self._turn_s * (len(slot.sharers) - 1)
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

    def _free_s(self, slot: Slot) -> float:
        """Return the seconds until another adapter can probably have a slot, or its first turn in it."""
        if self._is_replaceable(slot):
            return 0.0
        if self._has_room(slot):
            return self._turn_s * len(slot.sharers)
        return min(map(self._unused_s, slot.sharers))

    def _unused_s(self, sharer: Sharer) -> float:
        """Return the seconds until an adapter is probably unused. One that is in use for longer than its requests take
        seems to get new ones until it drains.
        """
        drain_s = self._drain_s(sharer)
        renewed = not sharer.draining and self._now_s - sharer.busy_since_s > drain_s
        return drain_s + DRAIN_AFTER_S if renewed else drain_s

    def _drain_s(self, sharer: Sharer) -> float:
        """Return the seconds until the requests that use an adapter have probably ended."""
        left = max((self._tokens_left(request) for request in sharer.users.values()), default=0.0)
        return max(self._residence_left_s(sharer), left * self._step_s * len(sharer.slot.sharers))

    def _tokens_left(self, request: Request) -> float:
        if request.status is Status.FINISHED:
            return 0.0
        if self._lengths is None:
            return float(request.max_len - len(request.tokens))
        return self._lengths.left(request, max(1, request.num_outputs))

    # --- inspection ---------------------------------------------------------------------------------------------
    def publish(self, promise: Promise) -> Promise:
        """Return a promise that says where adapters are. One that is being loaded counts as loaded."""
        held = [each for each in self._sharers.values() if each is each.slot.current and not each.draining]
        held.sort(key=lambda sharer: -sharer.used)
        return promise._replace(
            device_adapters=adapter_keys([sharer.digest for sharer in held], MAX_DEVICE_ADAPTERS_COUNT),
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
            sum(slot.is_used for slot in self._slots),
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
        sharers = [sharer for slot in self._slots for sharer in slot.sharers]
        assert seated == sorted(name for sharer in sharers for name in sharer.users), "references of slots"
        assert {sharer.digest: sharer for sharer in sharers} == self._sharers, "an adapter in two slots or none"
        for sharer in sharers:
            assert all(digest_of(request) == sharer.digest for request in sharer.users.values()), "another's slot"
            assert sharer.draining == (sharer is self._draining), sharer
        for slot in self._slots:
            assert slot.current in slot.sharers if slot.sharers else slot.current is None, slot
            assert not (slot.loading and slot.in_flight), "a load overwrites what rows use"
            assert slot.closing == (slot is self._closing), slot
            assert not slot.absent or all(sharer.digest in self.host for sharer in slot.sharers), "a copy is gone"
        known = {id(r) for r in self._joined} | {id(r) for held in self._waiting.values() for r in held.values()}
        assert all(id(r) in known for r in with_adapter if r.status is Status.WAITING), "a waiting request is unknown"
        for digest, waiting in self._waiting.items():
            usable, sharer_or_none = self.is_usable(digest), self._sharers.get(digest)
            assert all(
                r.status is Status.WAITING and (r.loading is Cause.ADAPTER) <= (not usable) for r in waiting.values()
            )
            assert usable or all(request.loading is not None for request in waiting.values()), "it could start"
            assert (digest in self._wanted) == (sharer_or_none is None or sharer_or_none.draining), "it is not wanted"
        assert self._wanted.keys() <= self._waiting.keys(), "no request wants it"
        self.host.check_integrity()


def digest_of(request: Request) -> str:
    """Return the digest of a request's adapter; empty without one."""
    return "" if request.meta.adapter is None else request.meta.adapter.digest
