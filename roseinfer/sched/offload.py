"""K/V in host memory, as the scheduler uses it: what is stored there, and what is loaded instead of computed.

A full block is stored when it is first used again, when its request loses it to others, and when it would be given to
others next: most prefixes are used again long after that. A request whose prefix goes on in host memory behind what the
cache holds has it loaded before it starts, if that is sooner than computing it. Until then it waits: it has KV blocks,
and no seat.

Copies run beside the rows of a step, which is not over before they are. So a step has no more of them than its rows
take by themselves, as far as the cost model knows. (On a CPU they run before the rows: then it takes that much longer,
which the cost model is not told.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from roseinfer.core.outputs import OffloadStats
from roseinfer.core.plan import HostCopy, StepPlan, StepResult
from roseinfer.core.request import Request
from roseinfer.kv.blocks import IndexEntry, PrefixHit
from roseinfer.kv.host import HostCache
from roseinfer.kv.manager import KvManager
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import work_of
from roseinfer.sched.estimates import CostOptions, Estimates
from roseinfer.sched.plan_builder import PlanBuilder

IDLE_S = 0.01  # of copies in a step without rows: who comes meanwhile waits for its end
_NEARLY = 1.1
_OTHERS = 0.25  # what a step's length counts of each that runs, beside who waits for its first token
_GAIN = 0.25  # of a step's copies, as far as their speed is followed


@dataclass(frozen=True, slots=True)
class OffloadCosts:
    """What is weighed against each other. `cost`: what steps cost; `learns`: nobody else tells it of them. `load_s`,
    `store_s`: seconds for a block, to begin with.
    """

    cost: CostModel = field(default_factory=lambda: Estimates().cost)
    learns: bool = True
    load_s: float = 0.0
    store_s: float = 0.0

    @classmethod
    def beside(cls, options: object, known: Estimates, load_s: float, store_s: float) -> "OffloadCosts":
        """Beside a policy with these options, which tells `known` of steps if it predicts what they take."""
        return cls(known.cost, not isinstance(options, CostOptions), load_s, store_s)


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """What one request waits for. `planned` of its copies are in plans, `done` of those are there."""

    request: Request
    copies: list[HostCopy]
    planned: int = 0
    done: int = 0


class KvOffload:
    """Of one scheduler. `load_s`, `store_s`: seconds for a block, as lately.

    `hold(request)` is called when a request begins to wait for its load, and when it waits for that no longer;
    `request.loading` says which.
    """

    def __init__(
        self,
        kv: KvManager,
        host: HostCache,
        offloading: OffloadCosts,
        hold: Callable[[Request], None],
    ) -> None:
        self.load_s, self.store_s = offloading.load_s, offloading.store_s
        self._kv, self._host = kv, host
        self._cost, self._learns = offloading.cost, offloading.learns
        self._hold = hold
        self._queue: deque[PrefixLoad] = deque()  # not all of them planned
        self._queued = 0  # blocks of these that are in no plan
        self._loads: dict[str, PrefixLoad] = {}
        self._carried: dict[int, list[tuple[PrefixLoad, int]]] = {}  # by step: what its loads are of
        self._landed: dict[str, int] = {}  # they hold so many loaded tokens until they start
        self._reused: dict[int, IndexEntry] = {}  # KV blocks that are worth a copy, and what they held then
        self._begun: list[HostCopy] = []  # stores that the next plan has to have
        self._step_s = 0.0  # of the newest step with rows
        self._loaded = self._stored = self._queries = self._hits = 0
        self._loads_s = self._stores_s = 0.0

    # --- what a request gains -----------------------------------------------------------------------------------
    def behind(self, request: Request, hit: PrefixHit, in_flight: int, running: int) -> tuple[int, ...]:
        """The host blocks that are to be loaded behind a hit; none if they had better be computed.

        Copies must take less than computing does. The steps that go by meanwhile (see `seconds`) hold up this request
        only, where computing would hold up all that run in the same step: that counts, but a first token for more than
        the next one of another. What is left of the prompt is computed anyway, and reads the same experts.
        """
        host_blocks = self._kv.match_host(request.request_id, request.tokens, hit)
        if not host_blocks:
            return ()
        size = self._kv.block_size
        computed_s = self._cost.params.prefill_s(len(hit.blocks) * size, len(host_blocks) * size, inf)
        if self.seconds(len(host_blocks), 0, 0) >= computed_s:
            return ()
        return host_blocks if self.seconds(0, in_flight, running) < computed_s * (1 + _OTHERS * running) else ()

    def seconds(self, blocks: int, in_flight: int, running: int) -> float:
        """Until so many blocks are loaded, behind those that wait to be.

        A request with a load starts when the steps in flight and the one that carries it are over, one without in this
        step. `running`: requests, without which a step lasts as long as its copies.
        """
        waits_s = (in_flight + 1) * self._step_s if running else 0.0
        return max(waits_s, self.load_s * (self._queued + blocks))

    @property
    def num_waiting(self) -> int:
        """Requests that are to start once their load is done."""
        return len(self._loads) + len(self._landed)

    # --- loads --------------------------------------------------------------------------------------------------
    def is_loading(self, host_blocks: Sequence[int]) -> bool:
        """Whether another request is having them loaded."""
        return self._host.is_loading(host_blocks)

    def begin(self, request: Request, host_blocks: Sequence[int]) -> None:
        """Let a request that holds nothing but its hit wait for what these host blocks hold. There are KV blocks."""
        known, held = len(request.tokens), len(self._kv.table(request.request_id)) * self._kv.block_size
        load = PrefixLoad(request, self._kv.load(request.request_id, host_blocks))
        self._loads[request.request_id] = load
        self._queue.append(load)
        self._queued += len(load.copies)
        self._queries += known - held
        self._hits += len(host_blocks) * self._kv.block_size
        request.loading = True
        self._hold(request)

    def take_back(self, request: Request) -> int:
        """Free the blocks of a request whose load is done, so that it can attach them as a hit.

        Returns how many tokens were loaded for it, 0 if it holds nothing.
        """
        loaded = self._landed.pop(request.request_id, 0)
        if loaded:
            self._kv.release(request.request_id)
        return loaded

    def keep(self, request: Request, loaded: int) -> bool:
        """A request that could not start goes on holding what it has attached, if it was loaded for it."""
        if loaded:
            self._landed[request.request_id] = loaded
        return loaded > 0

    def started(self, request: Request, cached: int, loaded: int) -> None:
        """A request has its seat, and this hit; `loaded` of its tokens were loaded for it."""
        if not loaded:
            self._queries += len(request.tokens) - cached
        if not request.fork_of:
            self._reuse(self._kv.table(request.request_id)[: cached // self._kv.block_size])

    def reclaim(self, *, loads: bool = False) -> bool:
        """Free blocks of a request that holds them until it starts, the newest first; with `loads` also of one whose
        load is not in plans altogether, and which it then waits for no longer. False if there is none.
        """
        if self._landed:
            name, _ = self._landed.popitem()
            self._kv.release(name)
        elif loads and self._queue:
            request = self._queue[-1].request
            self.forget(request)
            self._kv.release(request.request_id)
            request.loading = False
            self._hold(request)
        else:
            return False
        return True

    def forget(self, request: Request) -> None:
        """The request has ended. What is in plans goes on, for whoever comes with the same prefix."""
        self._landed.pop(request.request_id, None)
        load = self._loads.pop(request.request_id, None)
        if load is None or load.planned == len(load.copies):
            return
        rest = load.copies[load.planned :]
        self._queue.remove(load)
        self._queued -= len(rest)
        self._host.cancel_loads(rest)

    # --- stores -------------------------------------------------------------------------------------------------
    def _reuse(self, blocks: Sequence[int]) -> None:
        """These full KV blocks, the head of a chain first, were used again: they are worth a copy."""
        self._host.touch(blocks)
        if not self._pays(self._kv.max_tokens):
            return
        for block in blocks:
            held = self._host.full_entry(block)
            if held is not None and self._host.should_store(block):
                self._reused[block] = held

    def losing(self, request: Request) -> None:
        """A preempted request is about to give up its blocks: begin to store what it has computed, from its head on, as
        far as a step has time for it.
        """
        if not self._pays(request.computed):
            return
        blocks = self._kv.table(request.request_id)[: request.computed // self._kv.block_size]
        room = self._room(self._step_s or IDLE_S, self.store_s)
        for block in blocks:
            if len(self._begun) >= room:
                break
            self._store(block)

    def _pays(self, tokens: int) -> bool:
        """Whether a prefix of so many tokens is loaded sooner than it is computed."""
        return self.load_s * (tokens // self._kv.block_size) < self._cost.params.prefill_s(0, tokens, inf)

    def _store(self, block: int) -> None:
        copy = self._host.begin_store(block)
        if copy is not None:
            self._begun.append(copy)

    # --- plans --------------------------------------------------------------------------------------------------
    @property
    def must_plan(self) -> bool:
        """Whether there is something for a plan without rows."""
        return bool(self._queue or self._begun)

    @property
    def blocks_on_call(self) -> int:
        """KV blocks that are not free, but whoever starts can have them: those of requests that are loaded and wait to
        start, of which one may be who starts; and in a step or two those that are being stored before others get them.
        """
        loaded = sum(len(self._kv.table(name)) for name in self._landed)
        return loaded + self._host.num_evicting

    @property
    def blocks_coming(self) -> int:
        """KV blocks that are free, but for the stores under way (an upper bound)."""
        return self._host.num_storing

    def fill(self, draft: PlanBuilder) -> None:
        """Give a step its copies."""
        ahead = 2 * self._kv.blocks_for(draft.budget)
        at_risk = len(draft) > 0 and self._host.eviction_near(ahead)
        if not (at_risk or self._queue or self._begun or self._reused):
            return
        rows = draft.rows
        seconds = self._cost.seconds(work_of(rows)) if rows else IDLE_S
        draft.loads = self._next_loads(draft.step, max(1, self._room(seconds, self.load_s)))
        room = self._room(seconds, self.store_s)
        while self._reused and len(self._begun) < room:
            block, entry = next(iter(self._reused.items()))
            del self._reused[block]
            if self._host.full_entry(block) is entry:
                self._store(block)
        if at_risk and self._pays(self._kv.max_tokens):
            # A block that is being stored is nobody's, so enough are left for the next step.
            spare = self._kv.num_free - min(ahead // 2, self._kv.num_blocks // 4)
            self._begun += self._host.store_next_evicted(ahead, max(0, min(room - len(self._begun), spare)))
        draft.stores, self._begun = self._begun, []

    def _room(self, seconds: float, each_s: float) -> int:
        """Copies that a step of so many seconds has time for."""
        return int(seconds / each_s) if each_s > 0 else self._kv.num_blocks

    def _next_loads(self, step: int, room: int) -> list[HostCopy]:
        found: list[HostCopy] = []
        while self._queue and len(found) < room:
            load = self._queue[0]
            copies = load.copies[load.planned : load.planned + room - len(found)]
            load.planned += len(copies)
            self._queued -= len(copies)
            self._carried.setdefault(step, []).append((load, len(copies)))
            found += copies
            if load.planned == len(load.copies):
                self._queue.popleft()
        return found

    def done(self, plan: StepPlan, result: StepResult) -> None:
        """A step is over, and its copies with it."""
        if plan.rows:
            rows_s = rows_seconds(result, result.duration_s)
            self._step_s = rows_s or result.duration_s
            if self._learns and rows_s:
                self._cost.observe(work_of(plan.rows), rows_s)
        if plan.stores:
            self._host.finish_stores(plan.stores)
            self._stored += len(plan.stores)
            self._stores_s += result.stores_s
            self.store_s = _follow(self.store_s, result.stores_s, len(plan.stores))
        if plan.loads:
            self._host.finish_loads(plan.loads)
            self._loaded += len(plan.loads)
            self._loads_s += result.loads_s
            self.load_s = _follow(self.load_s, result.loads_s, len(plan.loads))
            for load, count in self._carried.pop(plan.step):
                self._land(load, count)

    def _land(self, load: PrefixLoad, count: int) -> None:
        load.done += count
        request = load.request
        if load.done == len(load.copies) and self._loads.get(request.request_id) is load:
            del self._loads[request.request_id]
            self._landed[request.request_id] = len(load.copies) * self._kv.block_size
            request.loading = False
            self._hold(request)

    @property
    def num_blocks(self) -> int:
        """Host blocks."""
        return self._host.num_blocks

    # --- looking in ---------------------------------------------------------------------------------------------
    def stats(self) -> OffloadStats:
        return OffloadStats(
            self._host.num_used,
            self._host.num_blocks,
            self.num_waiting,
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
            assert load.request.request_id == name and load.request.loading, f"{name!r} waits for a load"
        assert self._landed.keys().isdisjoint(self._loads), "a load is under way or done"


def rows_seconds(result: StepResult, duration_s: float) -> float:
    """What the rows took of a step that took `duration_s` with what the host did around it.

    0 if nobody knows: copies beside them took as long as the step.
    """
    if result.copies_first:
        return max(0.0, duration_s - result.loads_s - result.stores_s)
    return 0.0 if 0 < _NEARLY * max(result.loads_s, result.stores_s) >= result.duration_s else duration_s


def _follow(before_s: float, seconds: float, blocks: int) -> float:
    """What a block takes, after a step in which so many took so long."""
    if seconds <= 0:
        return before_s
    return before_s + _GAIN * (seconds / blocks - before_s) if before_s > 0 else seconds / blocks
