"""K/V offload: which blocks are stored in host memory, and which are loaded instead of computed.

A full block is stored when it is first reused, when its request is preempted, and when it would be evicted next: most
prefixes are reused long after that. If host memory continues a waiting request's cached prefix, the blocks are loaded
before the request starts, unless computing them is faster. Meanwhile the request has KV blocks but no seat.

Copies run in parallel with the rows of a step, and the step ends after both. So a step gets no more copies than fit
into the time that the cost model predicts for its rows. (On a CPU, copies run before the rows and make the step longer;
the cost model does not learn from that part.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from roseinfer.core.outputs import OffloadStats
from roseinfer.core.plan import HostCopy, StateChanges, StepPlan, StepResult
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.kv.blocks import IndexEntry, PrefixHit
from roseinfer.kv.host import HostCache
from roseinfer.kv.manager import HostHit, KvManager
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.estimates import CostOptions, Estimates
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.state_offload import StateOffload

IDLE_COPIES_S = 0.01  # copies in a step without rows: a request that arrives meanwhile waits for its end
_COPY_TOLERANCE_SHARE = 1.1  # copies that take this multiple of a step hide what its rows took
_ROW_DELAY_SHARE = 0.25  # weight of a delay of each running request, relative to a first token's
_COST_GAIN_SHARE = 0.25  # weight of a step's copies in the smoothed seconds per block


@dataclass(frozen=True, slots=True)
class OffloadCosts:
    """Costs of computing and of copying. `learns`: the offload feeds `cost`, because the policy does not.

    `load_s`, `store_s`: initial seconds per block. `slot_blocks`: KV blocks that are as large as a recurrent state.
    """

    cost: CostModel = field(default_factory=lambda: Estimates().cost)
    learns: bool = True
    load_s: float = 0.0
    store_s: float = 0.0
    slot_blocks: float = 0.0

    @classmethod
    def for_policy(
        cls, options: object, known: Estimates, load_s: float, store_s: float, slot_blocks: float = 0.0
    ) -> "OffloadCosts":
        """Return the costs for a policy with these `options`, which feeds `known` itself if it predicts step times."""
        return cls(known.cost, not isinstance(options, CostOptions), load_s, store_s, slot_blocks)


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """Load of `tokens` tokens that one request waits for. `state`: copy of the state after them, or None.

    `planned` of its copies are in plans, and `done` of those are complete. That of the state is the last one.
    """

    request: Request
    copies: list[HostCopy]
    tokens: int
    state: HostCopy | None = None
    planned: int = 0
    done: int = 0

    @property
    def total(self) -> int:
        """Count of its copies, that of the state included."""
        return len(self.copies) + (self.state is not None)


class KvOffload:
    """Loads and stores of one Scheduler. `load_s`, `store_s`: recent seconds per block.

    `loading_changed(request)` is called when a request begins or finishes to wait for its load, after `request.loading`
    was set.
    """

    def __init__(
        self,
        kv: KvManager,
        host: HostCache,
        offloading: OffloadCosts,
        loading_changed: Callable[[Request], None],
    ) -> None:
        self.load_s, self.store_s = offloading.load_s, offloading.store_s
        self._kv, self._host = kv, host
        self.slot_blocks = offloading.slot_blocks
        self.states: StateOffload | None = None
        if kv.states is not None and kv.host_states is not None:
            self.states = StateOffload(kv, kv.states, kv.host_states)
        self.cost, self._learns = offloading.cost, offloading.learns
        self._loading_changed = loading_changed
        self._queue: deque[PrefixLoad] = deque()  # loads with copies that are in no plan
        self._queued = 0  # count of these copies
        self._loads: dict[str, PrefixLoad] = {}
        self._loads_by_step: dict[int, list[tuple[PrefixLoad, int]]] = {}  # by step
        self._holding: dict[str, int] = {}  # loaded tokens of requests that hold blocks until they start
        self._reused: dict[int, IndexEntry] = {}  # KV blocks to store, and what they held when they were reused
        self._new_stores: list[HostCopy] = []  # stores that the next plan must carry
        self._step_s = 0.0  # duration of the newest step with rows
        self._loaded = self._stored = self._queries = self._hits = 0
        self._loads_s = self._stores_s = 0.0

    # --- loading compared with computing ------------------------------------------------------------------------
    def loadable(self, request: Request, hit: PrefixHit, in_flight: int, running: int) -> HostHit | None:
        """Return what to load from host memory after a prefix hit; None if computing it is better.

        Copies must take less time than computing. The steps that pass meanwhile (see `wait_s`) delay this request only,
        while computing would delay all running requests. So the delay of those counts too, at a lower weight than that
        of a first token. The rest of the prompt is computed anyway, and reads the same experts.
        """
        host_hit = self._kv.match_host(request.request_id, request.tokens, hit)
        if not host_hit:
            return None
        computed_s = self.cost.params.prefill_s(hit.tokens, host_hit.tokens - hit.tokens, inf)
        if self.load_wait_s(host_hit, 0, 0) >= computed_s:
            return None
        return host_hit if self.wait_s(0, in_flight, running) < computed_s * (1 + _ROW_DELAY_SHARE * running) else None

    def load_wait_s(self, host_hit: HostHit, in_flight: int, running: int) -> float:
        """Return `wait_s` of what a hit in host memory loads."""
        return self.wait_s(len(host_hit.blocks) + self.slot_blocks * len(host_hit.slots), in_flight, running)

    def wait_s(self, blocks: float, in_flight: int, running: int) -> float:
        """Return the seconds until `blocks` blocks are loaded, after the loads that are queued already.

        A request with a load starts after the steps in flight and the one that carries the load. `running`: number of
        running requests; without any, a step lasts as long as its copies.
        """
        waits_s = (in_flight + 1) * self._step_s if running else 0.0
        return max(waits_s, self.load_s * (self._queued + blocks))

    @property
    def num_loads(self) -> int:
        """Count of the requests that wait for a load or, after one, for their start."""
        return len(self._loads) + len(self._holding)

    # --- loads --------------------------------------------------------------------------------------------------
    def is_loading(self, host_hit: HostHit) -> bool:
        """True if a part of this is being loaded for another request."""
        if self.states is not None and self.states.is_loading(host_hit.slots):
            return True
        return self._host.is_loading(host_hit.blocks)

    def begin(self, request: Request, host_hit: HostHit) -> None:
        """Begin to load from host memory for a request that holds only its prefix hit. There are enough KV blocks."""
        tokens = len(host_hit.blocks) * self._kv.block_size
        if host_hit.slots:
            tokens = host_hit.tokens - host_hit.cached
        load = PrefixLoad(request, self._kv.load(request.request_id, host_hit), tokens)
        if self.states is not None:
            load.state = self.states.load(host_hit.slots)
        self._loads[request.request_id] = load
        self._queue.append(load)
        self._queued += len(load.copies)
        self._queries += len(request.tokens) - host_hit.tokens + tokens
        self._hits += tokens
        request.loading = Cause.LOAD
        self._loading_changed(request)

    def release_loaded(self, request: Request) -> int:
        """Release the blocks of a request whose load is done, so that it can attach them as a prefix hit.

        Return how many tokens were loaded for it, 0 if it holds nothing.
        """
        loaded = self._holding.pop(request.request_id, 0)
        if loaded:
            self._kv.release(request.request_id)
        return loaded

    def hold_blocks(self, request: Request, loaded: int) -> bool:
        """Let a request that could not start hold its attached blocks if they were loaded for it."""
        if loaded:
            self._holding[request.request_id] = loaded
        return loaded > 0

    def started(self, request: Request, cached: int, loaded: int) -> None:
        """Record that a request has started with `cached` tokens, of which `loaded` were loaded for it."""
        if not loaded:
            self._queries += len(request.tokens) - cached
        if not request.fork_of:
            self._reuse(self._kv.table(request.request_id)[: cached // self._kv.block_size])

    def reclaim(self, *, loads: bool = False) -> bool:
        """Free the blocks of one request that holds them until it starts, the newest first. Return False without any.

        `loads`: cancel a load that is not fully planned if no other request holds blocks.
        """
        if self._holding:
            name, _ = self._holding.popitem()
            self._kv.release(name)
        elif loads and self._queue:
            request = self._queue[-1].request
            self.drop_load(request)
            self._kv.release(request.request_id)
            request.loading = None
            self._loading_changed(request)
        else:
            return False
        return True

    def drop_load(self, request: Request) -> None:
        """Drop the load of a request that ended or gave it up.

        Its planned copies complete, for later requests with the same prefix.
        """
        self._holding.pop(request.request_id, None)
        load = self._loads.pop(request.request_id, None)
        if load is None or load.planned == load.total:
            return
        rest = load.copies[load.planned :]
        self._queue.remove(load)
        self._queued -= len(rest)
        self._host.cancel_loads(rest)
        if self.states is not None and load.state is not None:
            self.states.cancel_load(load.state)

    # --- stores -------------------------------------------------------------------------------------------------
    def _reuse(self, blocks: Sequence[int]) -> None:
        """Mark full KV blocks that were reused, the head of a chain first, so that they are stored."""
        self._host.touch(blocks)
        if not self._worth_loading(self._kv.max_tokens):
            return
        for block in blocks:
            held = self._host.full_entry(block)
            if held is not None and self._host.should_store(block):
                self._reused[block] = held

    def before_release(self, request: Request) -> None:
        """Begin to store the blocks of a preempted request, from the first on, as far as a step has time for it."""
        if not self._worth_loading(request.computed):
            return
        if self.states is not None:
            self.states.store_last(request)
        blocks = self._kv.table(request.request_id)[: request.computed // self._kv.block_size]
        room = self._copies_within(self._step_s or IDLE_COPIES_S, self.store_s)
        for block in blocks:
            if len(self._new_stores) >= room:
                break
            self._store(block)

    def _worth_loading(self, tokens: int) -> bool:
        """True if a prefix of `tokens` tokens is loaded faster than it is computed."""
        return self.load_s * (tokens // self._kv.block_size) < self.cost.params.prefill_s(0, tokens, inf)

    def _store(self, block: int) -> None:
        copy = self._host.begin_store(block)
        if copy is not None:
            self._new_stores.append(copy)

    # --- plans --------------------------------------------------------------------------------------------------
    @property
    def must_plan(self) -> bool:
        """True if copies are due even in a plan without rows."""
        return bool(self._queue or self._new_stores) or (self.states is not None and self.states.must_plan)

    @property
    def reclaimable_blocks(self) -> int:
        """Count of KV blocks that are not free but that a request can take when it starts.

        These are blocks held by loaded requests that wait to start, and blocks being stored before eviction, which
        become free within a step or two.
        """
        loaded = sum(len(self._kv.table(name)) for name in self._holding)
        return loaded + self._host.num_evicting

    @property
    def blocks_being_stored(self) -> int:
        """Upper bound on the KV blocks that become free when the current stores end."""
        return self._host.num_storing

    def add_copies(self, builder: PlanBuilder) -> None:
        """Add the copies of a step."""
        ahead = 2 * self._kv.blocks_for(builder.budget)
        if self.states is not None:
            self._add_state_stores(self.states, builder)
        at_risk = len(builder) > 0 and self._host.eviction_near(ahead)
        if not (at_risk or self._queue or self._new_stores or self._reused):
            return
        rows = builder.rows
        seconds = self.cost.seconds(self.cost.params.work(rows)) if rows else IDLE_COPIES_S
        self._add_loads(builder, max(1, self._copies_within(seconds, self.load_s)))
        room = self._copies_within(seconds, self.store_s)
        while self._reused and len(self._new_stores) < room:
            block, entry = next(iter(self._reused.items()))
            del self._reused[block]
            if self._host.full_entry(block) is entry:
                self._store(block)
        if at_risk and self._worth_loading(self._kv.max_tokens):
            # No request can take a block while it is stored, so leave enough blocks for the next step.
            spare = self._kv.num_free - min(ahead // 2, self._kv.num_blocks // 4)
            self._new_stores += self._host.store_next_evicted(ahead, max(0, min(room - len(self._new_stores), spare)))
        builder.stores, self._new_stores = self._new_stores, []

    def _add_state_stores(self, states: StateOffload, builder: PlanBuilder) -> None:
        if len(builder) and states.has_candidates and self._worth_loading(self._kv.max_tokens):
            seconds = self.cost.seconds(self.cost.params.work(builder.rows))
            states.store_next(self._copies_within(seconds, self.store_s * self.slot_blocks))
        builder.state_stores = states.take_stores()

    def _copies_within(self, seconds: float, each_s: float) -> int:
        """Return how many copies of `each_s` seconds fit into a step of `seconds` seconds."""
        return int(seconds / each_s) if each_s > 0 else self._kv.num_blocks

    def _add_loads(self, builder: PlanBuilder, room: int) -> None:
        """Add up to `room` loads of blocks. A load's last step carries that of its state."""
        while self._queue and len(builder.loads) < room:
            load = self._queue[0]
            copies = load.copies[load.planned : load.planned + room - len(builder.loads)]
            builder.loads += copies
            self._queued -= len(copies)
            count = len(copies)
            load.planned += count
            if load.state is not None and load.planned == len(load.copies):
                builder.state_loads = [*builder.state_loads, load.state]
                load.planned, count = load.total, count + 1
                room -= round(self.slot_blocks)
            self._loads_by_step.setdefault(builder.step, []).append((load, count))
            if load.planned == load.total:
                self._queue.popleft()

    def done(self, plan: StepPlan, result: StepResult) -> None:
        """Record that a step and its copies are done."""
        if plan.rows:
            rows_s = rows_seconds(result, result.duration_s)
            self._step_s = rows_s or result.duration_s
            if self._learns and rows_s:
                self.cost.observe(self.cost.params.work(plan.rows, plan.ahead, plan.states), rows_s)
        changes = plan.states or StateChanges()
        if self.states is not None:
            self.states.done(changes)
        stores_s, store_s = self._share(result.stores_s, len(plan.stores), len(changes.stores))
        loads_s, load_s = self._share(result.loads_s, len(plan.loads), len(changes.loads))
        if plan.stores:
            self._host.finish_stores(plan.stores)
            self._stored += len(plan.stores)
            self._stores_s += stores_s
        if plan.loads:
            self._host.finish_loads(plan.loads)
            self._loaded += len(plan.loads)
            self._loads_s += loads_s
        self.store_s = _smoothed(self.store_s, store_s)
        self.load_s = _smoothed(self.load_s, load_s)
        for load, count in self._loads_by_step.pop(plan.step, ()):
            self._finish_load(load, count)

    def _share(self, seconds: float, blocks: int, slots: int) -> tuple[float, float]:
        """Return how much of the time of copies was for blocks, and the time per block; 0 if there are none."""
        total = blocks + slots * self.slot_blocks
        return (seconds * blocks / total, seconds / total) if total else (0.0, 0.0)

    def _finish_load(self, load: PrefixLoad, count: int) -> None:
        load.done += count
        request = load.request
        if load.done == load.total and self._loads.get(request.request_id) is load:
            del self._loads[request.request_id]
            self._holding[request.request_id] = load.tokens
            request.loading = None
            self._loading_changed(request)

    @property
    def num_blocks(self) -> int:
        """Count of host blocks."""
        return self._host.num_blocks

    # --- inspection ---------------------------------------------------------------------------------------------
    def stats(self) -> OffloadStats:
        return OffloadStats(
            self._host.num_used,
            self._host.num_blocks,
            self.num_loads,
            self._queries,
            self._hits,
            self._loaded,
            self._stored,
            self._loads_s,
            self._stores_s,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if requests and their loads disagree."""
        assert self._queued == sum(len(load.copies) - load.planned for load in self._queue), "copies that wait"
        for name, load in self._loads.items():
            assert load.request.request_id == name and load.request.loading is Cause.LOAD, f"{name!r} waits for a load"
        assert self._holding.keys().isdisjoint(self._loads), "a load is under way or done"


def rows_seconds(result: StepResult, duration_s: float) -> float:
    """Return the time of a step's rows; `duration_s` is the step's duration including the host's work.

    Return 0 if it is unknown, because the copies took as long as the step.
    """
    if result.copies_first:
        return max(0.0, duration_s - result.loads_s - result.stores_s)
    return 0.0 if 0 < _COPY_TOLERANCE_SHARE * max(result.loads_s, result.stores_s) >= result.duration_s else duration_s


def _smoothed(before_s: float, block_s: float) -> float:
    """Return the smoothed seconds per block after copies of `block_s` each; 0 = not measured."""
    if block_s <= 0:
        return before_s
    return before_s + _COST_GAIN_SHARE * (block_s - before_s) if before_s > 0 else block_s
