"""Seating: how a waiting request starts. It attaches its cached prefix, gets a seat, and a first row in the step."""

from collections.abc import Sequence
from enum import Enum

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.plan import Admission
from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause
from roseinfer.kv.manager import HostHit, KvManager, PrefixHit
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import Decision, Verdict
from roseinfer.sched.roster import Roster

# Share of the cache that admission leaves free while other requests run, so that they can grow before a preemption.
ADMISSION_RESERVE_SHARE = 0.01


class Start(Enum):
    """Outcome of an attempt to start a waiting request."""

    STARTED = "started"
    LOADING = "loading"  # its prefix has to be loaded from host memory first
    NO_ROOM = "no room"


class Seating:
    """Admits waiting requests into seats. One per Scheduler.

    `blocked_by`: what kept the last request that was tried in this step from starting; None if all started. `reserve`:
    blocks that admission leaves free while other requests run. `prefix_queries`, `prefix_hits`: tokens that were looked
    up in the prefix index, and found.
    """

    def __init__(self, config: SchedulerConfig, kv: KvManager, roster: Roster, recomputed: int = 0) -> None:
        """`recomputed`: tokens of a cached prefix that are computed again, without writing their K/V."""
        self.reserve = int(kv.num_blocks * ADMISSION_RESERVE_SHARE)
        self.blocked_by: Cause | None = None
        self.prefix_queries = self.prefix_hits = 0
        self._config, self._kv, self._roster = config, kv, roster
        self._recomputed = recomputed
        self._ready: list[Request] | None = None  # this step's snapshot, made on demand

    # --- which requests could start -----------------------------------------------------------------------------
    def invalidate_ready(self) -> None:
        """Drop the cached list of startable requests, because the queue has changed."""
        self._ready = None

    def ready(self) -> Sequence[Request]:
        """Return the leads of the entries that could start in this step, in order."""
        if self._ready is None:
            self._ready = self._roster.waiting.ready()
        return self._ready

    @property
    def free_blocks(self) -> int:
        """Count of the KV blocks that requests which start may take."""
        reclaimable = 0 if self._roster.offload is None else self._roster.offload.reclaimable_blocks
        return max(0, self._kv.num_free_to_start + reclaimable - (self.reserve if self._roster.running else 0))

    def exhausted(self, builder: PlanBuilder) -> Cause | None:
        """Return the resource that the step has used up, so that no other request can start in it."""
        if not self.free_seats:
            return self.seat_cause
        return Cause.BUDGET if builder.tokens_left <= 0 else None

    @property
    def free_seats(self) -> int:
        """Count of the seats that requests which start may take."""
        seats, states = len(self._roster.free_seats), self._kv.states
        return seats if states is None else min(seats, states.num_free_to_start)

    @property
    def seat_cause(self) -> Cause:
        """Cause of a wait for one of `free_seats`."""
        return Cause.SEATS if self.free_seats == len(self._roster.free_seats) else Cause.SLOTS

    # --- starting -----------------------------------------------------------------------------------------------
    def admit(self, builder: PlanBuilder, decision: Decision, now_s: float) -> None:
        """Start the requests that the policy admits, as far as there is room."""
        roster = self._roster
        self.blocked_by = self.exhausted(builder)
        if not roster.waiting or self.blocked_by is not None:
            return
        started: list[Request] = []
        for lead in decision.order(self.ready()):
            if not roster.waiting.can_start(lead):
                roster.report_fault("ordered a request twice or one that cannot start")
            elif not self._start_entry(builder, decision, lead, started):
                break
        for request in started:
            roster.start(request, now_s)

    def _start_entry(self, builder: PlanBuilder, decision: Decision, lead: Request, started: list[Request]) -> bool:
        """Start a waiting request and the samples that could start with it, as far as the policy admits them.

        Return False if no other request can start in this step.
        """
        for request in self._roster.waiting.members(lead):
            verdict = decision.admit(request)
            if verdict is Verdict.SKIP:
                return True
            if verdict is Verdict.STOP:
                return False
            self.blocked_by = self.exhausted(builder)
            if self.blocked_by is not None:
                return False
            start = self._start(builder, decision, request, bool(started))
            if start is not Start.STARTED:
                return start is Start.LOADING
            started.append(request)
        return True

    def start_alone(self, builder: PlanBuilder, decision: Decision, request: Request, now_s: float) -> None:
        """Start a waiting request in a step that holds nothing else, if there is room."""
        if self._start(builder, decision, request, False) is Start.STARTED:
            self._roster.start(request, now_s)

    def _start(self, builder: PlanBuilder, decision: Decision, request: Request, others_started: bool) -> Start:
        """Seat a waiting request and plan its first row, or begin to load its prefix.

        Without room, take nothing; a request whose prefix was loaded holds these blocks until it starts.
        """
        request_id, known, offload = request.request_id, len(request.tokens), self._roster.offload
        loaded = offload.release_loaded(request) if offload is not None else 0
        cached = self._attach_cached(request)
        host_hit = self.host_hit_after(request, cached) if offload is not None and not loaded else None
        start = max(0, min(cached - self._recomputed, known - 1))
        count = 0 if host_hit else self._first_chunk(builder, decision, request, known - start, others_started)
        if not (host_hit or count):
            self.blocked_by = Cause.BUDGET
        elif not self._has_room(builder, request_id, known):
            self.blocked_by = Cause.BLOCKS
        elif host_hit:
            return self._load(request, host_hit)
        else:
            self._seat(builder, request, start, cached, count)
            self.prefix_queries += known
            # The last token of a prompt is computed even if all of it was loaded, as are blocks invalidated since.
            self.prefix_hits += max(0, min(cached, known - 1) - loaded)
            if offload is not None:
                offload.started(request, cached, loaded)
            return Start.STARTED
        if offload is None or not offload.hold_blocks(request, loaded):
            self._kv.release(request_id)
        return Start.NO_ROOM

    def _attach_cached(self, request: Request) -> int:
        """Attach the cached prefix of the request's tokens and return its length in tokens."""
        if request.needs_every_position:
            return 0  # every prompt position has to be computed for its logits
        parent = self._roster.requests.get(request.fork_of) if request.fork_of else None
        # Don't fork from a parent that has ended: it may have failed, and then its blocks may be wrong.
        if parent is not None and (parent.seat is None or parent.status is Status.FINISHED):
            parent = None
        prompt_len = request.prompt_len
        computed = parent is not None and parent.computed >= prompt_len and request.num_outputs == 0
        if parent is not None and computed and self._kv.can_fork(parent.request_id, prompt_len):
            self._kv.fork(parent.request_id, request.request_id, request.prompt_len)
            return request.prompt_len
        hit: PrefixHit = self._kv.match(request.request_id, request.tokens)
        self._kv.attach(request.request_id, hit)
        return hit.tokens

    def _first_chunk(
        self, builder: PlanBuilder, decision: Decision, request: Request, left: int, others_started: bool
    ) -> int:
        """Return the tokens of a waiting request's first row, 0 if it has to wait.

        Without chunking, a prompt that exceeds the budget runs when no other request starts in the same step.
        """
        if self._config.enable_chunked_prefill:
            return chunk(decision, request, left, builder.tokens_left)
        fits = left <= builder.tokens_left
        alone = left > self._config.max_num_batched_tokens and not others_started
        return left if fits or alone else 0

    def _has_room(self, builder: PlanBuilder, request_id: str, known: int) -> bool:
        """True if there are blocks for all known tokens of a request that has attached its cached prefix."""
        offload, others = self._roster.offload, self._roster.running or len(builder)
        reserve = self.reserve if others else 0
        while not self._kv.has_room(request_id, known, reserve):
            if offload is None or not offload.reclaim():
                return False
        return True

    def _seat(self, builder: PlanBuilder, request: Request, start: int, cached: int, count: int) -> None:
        """Give a request a seat and a first row of `count` tokens from position `start`."""
        request_id = request.request_id
        table, windows = self._kv.table(request_id), self._kv.window_tables(request_id)
        growth = self._kv.grow(request_id, start + count) if start + count > cached else None
        request.capacity = self._kv.capacity(request_id)
        request.seat = self._roster.free_seats.pop()
        if request.preemptions == 0:
            request.cached_tokens = min(cached, len(request.tokens) - 1)
        request.computed = request.planned = request.rowless = start
        request.write_from = cached
        adapters = self._roster.adapters
        admission = Admission(
            request_id,
            request.seat,
            list(request.tokens),
            request.prompt_len,
            request.params,
            request.seed,
            tuple(sorted(request.stop_ids)),
            table,
            request.pooling,
            -1 if adapters is None else adapters.seat(request),
        )
        builder.admit(admission, windows)
        if self._roster.snapshots is not None:
            builder.seated.append((request.seat, self._roster.snapshots.seat(request, start)))
        builder.add_row(request, count, growth)

    # --- cached and loadable prefixes ---------------------------------------------------------------------------
    def uncached(self, request: Request) -> int:
        """Return the tokens that a waiting request would compute before it can sample: at least the last one."""
        known = len(request.tokens)
        if request.needs_every_position:
            return known
        parent = None if request.num_outputs else request.fork_of
        if parent is not None and (parent in self._roster.running or self._roster.awaits_parent(request)):
            return 1
        hit = self._kv.match(request.request_id, request.tokens)
        cached = hit.tokens
        if self._roster.offload is not None:
            host_hit = self._roster.offload.loadable(request, hit, *self._activity())
            cached = hit.tokens if host_hit is None else host_hit.tokens
        return known - min(cached, known - 1)

    def load_s(self, request: Request) -> float:
        """Return the seconds until a waiting request's adapter and then its prefix are loaded, if that begins now."""
        adapters, adapter = self._roster.adapters, request.meta.adapter
        adapter_s = 0.0 if adapters is None or adapter is None else adapters.wait_s(adapter)
        return adapter_s + self._prefix_load_s(request)

    def _prefix_load_s(self, request: Request) -> float:
        """Return the seconds until a waiting request's prefix is loaded, if that begins now."""
        offload, known = self._roster.offload, len(request.tokens)
        if offload is None or request.fork_of is not None or request.needs_every_position:
            return 0.0
        hit = self._kv.match(request.request_id, request.tokens)
        host_hit = offload.loadable(request, hit, *self._activity()) if hit.tokens < known else None
        return offload.load_wait_s(host_hit, *self._activity()) if host_hit else 0.0

    def host_hit_after(self, request: Request, cached: int) -> HostHit | None:
        """Return what to load after the prefix that the request has attached. Needs host memory."""
        offload = self._roster.offload
        assert offload is not None
        if not cached and request.needs_every_position:
            return None
        hit = self._kv.match(request.request_id, request.tokens)
        # A fork of a running sample holds the whole prompt, even where the index does not.
        return offload.loadable(request, hit, *self._activity()) if hit.tokens == cached else None

    def _load(self, request: Request, host_hit: HostHit) -> Start:
        """Begin to load a prefix, unless the same blocks are loading already or no seat is left for one more load.

        Then the request holds no blocks and is tried again in a later step.
        """
        offload = self._roster.offload
        assert offload is not None
        full = offload.num_loads >= len(self._roster.free_seats)
        if full and self._activity() == (0, 0):
            # The policy starts none of the loaded requests, so one of them gives up its blocks.
            full = not offload.reclaim()
        if full or offload.is_loading(host_hit):
            self._kv.release(request.request_id)
        else:
            offload.begin(request, host_hit)
        return Start.LOADING

    def _activity(self) -> tuple[int, int]:
        """Return the number of steps in flight and of running requests."""
        return self._roster.in_flight, len(self._roster.running)


def chunk(decision: Decision, request: Request, left: int, room: int) -> int:
    """Return how many of a prompt's `left` tokens to compute in a step with `room` tokens left."""
    room = min(left, room)
    return max(0, min(room, decision.chunk(request, room)))
