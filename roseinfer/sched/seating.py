"""How a waiting request starts: what the caches hold of it is its own, it has a seat, and a first row in the step."""

from collections.abc import Sequence
from enum import Enum

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.plan import Admission
from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause
from roseinfer.kv.manager import KvManager, PrefixHit
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import Decision, Verdict
from roseinfer.sched.roster import Roster

# Share of the cache kept free when a request is admitted beside others, so that they can grow before one must yield.
ADMISSION_RESERVE = 0.01


class Start(Enum):
    """What came of a waiting request that was to start."""

    NOW = "now"
    LATER = "later"  # its prefix is to be loaded first
    NO_ROOM = "no room"


class Seating:
    """Of one scheduler.

    `lacking`: what the first of those that the policy lets start in this step has not found. `reserve`: blocks that
    are kept free beside others that run. `prefix_queries`, `prefix_hits`: tokens that were looked up in the cache, and
    found.
    """

    def __init__(self, config: SchedulerConfig, kv: KvManager, roster: Roster) -> None:
        self.reserve = int(kv.num_blocks * ADMISSION_RESERVE)
        self.lacking: Cause | None = None
        self.prefix_queries = self.prefix_hits = 0
        self._config, self._kv, self._roster = config, kv, roster
        self._ready: list[Request] | None = None  # this step's snapshot of who could start, once somebody asked

    # --- who could start ----------------------------------------------------------------------------------------
    def invalidate_ready(self) -> None:
        """Others wait than did when `ready` was asked."""
        self._ready = None

    def ready(self) -> Sequence[Request]:
        """The leads of the entries that could start in this step, in order."""
        if self._ready is None:
            self._ready = self._roster.waiting.ready()
        return self._ready

    @property
    def room(self) -> int:
        """KV blocks for whoever starts."""
        on_call = 0 if self._roster.offload is None else self._roster.offload.blocks_on_call
        return max(0, self._kv.num_free + on_call - (self.reserve if self._roster.running else 0))

    def exhausted(self, draft: PlanBuilder) -> Cause | None:
        """What the step has no more of, so that nobody else can start in it."""
        if not self._roster.free_seats:
            return Cause.SEATS
        return Cause.BUDGET if draft.tokens_left <= 0 else None

    # --- starting -----------------------------------------------------------------------------------------------
    def admit(self, draft: PlanBuilder, decision: Decision, now_s: float) -> None:
        """Start whom the policy lets start, as far as there is room."""
        roster = self._roster
        self.lacking = self.exhausted(draft)
        if not roster.waiting or self.lacking is not None:
            return
        started: list[Request] = []
        for lead in decision.order(self.ready()):
            if not roster.waiting.can_start(lead):
                roster.fault("started a request twice, or one that could not start")
            elif not self._start_entry(draft, decision, lead, started):
                break
        for request in started:
            roster.run(request, now_s)

    def _start_entry(self, draft: PlanBuilder, decision: Decision, lead: Request, started: list[Request]) -> bool:
        """Start a waiting request and its samples that could start with it, as far as the policy admits them.

        False if nobody else can start in this step.
        """
        for request in self._roster.waiting.members(lead):
            verdict = decision.admit(request)
            if verdict is Verdict.SKIP:
                return True
            if verdict is Verdict.STOP:
                return False
            self.lacking = self.exhausted(draft)
            if self.lacking is not None:
                return False
            start = self._start(draft, decision, request, bool(started))
            if start is not Start.NOW:
                return start is Start.LATER
            started.append(request)
        return True

    def start_alone(self, draft: PlanBuilder, decision: Decision, request: Request, now_s: float) -> None:
        """Start a waiting request in a step that holds nothing else, if there is room."""
        if self._start(draft, decision, request, False) is Start.NOW:
            self._roster.run(request, now_s)

    def _start(self, draft: PlanBuilder, decision: Decision, request: Request, others_started: bool) -> Start:
        """Seat a waiting request and plan its first row, or have what it needs loaded first. If there is no room for
        that nothing is taken.
        """
        request_id, known, offload = request.request_id, len(request.tokens), self._roster.offload
        loaded = offload.take_back(request) if offload is not None else 0
        cached = self._attach_cached(request)
        host_blocks = self.host_blocks_after(request, cached) if offload is not None and not loaded else ()
        start = min(cached, known - 1)
        count = 0 if host_blocks else self._first_chunk(draft, decision, request, known - start, others_started)
        if not (host_blocks or count):
            self.lacking = Cause.BUDGET
        elif not self._has_room(draft, request_id, known):
            self.lacking = Cause.BLOCKS
        elif host_blocks:
            return self._load(request, host_blocks)
        else:
            self._seat(draft, request, start, cached, count)
            self.prefix_queries += known
            # Of a whole prompt that was loaded the last token is computed again, and what was distrusted since is, too.
            self.prefix_hits += max(0, start - loaded)
            if offload is not None:
                offload.started(request, cached, loaded)
            return Start.NOW
        if offload is None or not offload.keep(request, loaded):
            self._kv.release(request_id)
        return Start.NO_ROOM

    def _attach_cached(self, request: Request) -> int:
        """Give the request what the cache holds of its tokens; returns how many tokens that is."""
        if request.needs_prompt_logprobs:
            return 0  # every prompt position has to be computed for its logits
        parent = self._roster.requests.get(request.fork_of) if request.fork_of else None
        # Not from a parent that ended: it may have failed, and then its blocks are not to be trusted.
        if parent is not None and (parent.seat is None or parent.status is Status.FINISHED):
            parent = None
        if parent is not None and parent.computed >= request.prompt_len and request.num_outputs == 0:
            self._kv.fork(parent.request_id, request.request_id, request.prompt_len)
            return request.prompt_len
        hit: PrefixHit = self._kv.match(request.request_id, request.tokens)
        self._kv.attach(request.request_id, hit)
        return hit.tokens

    def _first_chunk(
        self, draft: PlanBuilder, decision: Decision, request: Request, left: int, others_started: bool
    ) -> int:
        """Tokens of a waiting request's first row, 0 if it has to wait.

        Without chunking, a prompt that exceeds the budget runs when no other starts in the same step.
        """
        if self._config.enable_chunked_prefill:
            return chunk(decision, request, left, draft.tokens_left)
        fits = left <= draft.tokens_left
        alone = left > self._config.max_num_batched_tokens and not others_started
        return left if fits or alone else 0

    def _has_room(self, draft: PlanBuilder, request_id: str, known: int) -> bool:
        """Whether a request that has attached its hit finds blocks for all that is known of it."""
        offload, others = self._roster.offload, self._roster.running or len(draft)
        wanted = self._kv.growth_cost(request_id, known) + (self.reserve if others else 0)
        while wanted > self._kv.num_free:
            if offload is None or not offload.reclaim():
                return False
        return True

    def _seat(self, draft: PlanBuilder, request: Request, start: int, cached: int, count: int) -> None:
        """Give a request a seat and its first row, of `count` tokens from `start` on."""
        request_id = request.request_id
        table = self._kv.table(request_id)
        growth = self._kv.grow(request_id, start + count) if start + count > cached else None
        request.capacity = self._kv.capacity(request_id)
        request.seat = self._roster.free_seats.pop()
        if request.preemptions == 0:
            request.cached_tokens = start
        request.computed = request.planned = request.rowless = start
        request.write_from = cached
        draft.admitted.append(
            Admission(
                request_id,
                request.seat,
                list(request.tokens),
                request.prompt_len,
                request.params,
                request.seed,
                tuple(sorted(request.stop_ids)),
                table,
            )
        )
        draft.take(request, count, growth)

    # --- what is cached, and what is to be loaded ---------------------------------------------------------------
    def uncached(self, request: Request) -> int:
        """Tokens that a waiting request would compute before it can sample: at least the last one."""
        known = len(request.tokens)
        if request.needs_prompt_logprobs:
            return known
        parent = None if request.num_outputs else request.fork_of
        if parent is not None and (parent in self._roster.running or self._roster.awaits_parent(request)):
            return 1
        hit = self._kv.match(request.request_id, request.tokens)
        cached = hit.tokens
        if self._roster.offload is not None:
            cached += self._kv.block_size * len(self._roster.offload.behind(request, hit, *self._business()))
        return known - min(cached, known - 1)

    def load_s(self, request: Request) -> float:
        """Seconds until what is loaded for a waiting request is there, if it begins now. There is host memory."""
        offload = self._roster.offload
        assert offload is not None
        known = len(request.tokens)
        if request.fork_of is not None or request.needs_prompt_logprobs:
            return 0.0
        hit = self._kv.match(request.request_id, request.tokens)
        blocks = len(offload.behind(request, hit, *self._business())) if hit.tokens < known else 0
        return offload.seconds(blocks, *self._business()) if blocks else 0.0

    def host_blocks_after(self, request: Request, cached: int) -> tuple[int, ...]:
        """The host blocks that are to be loaded behind what the request has attached. There is host memory."""
        offload = self._roster.offload
        assert offload is not None
        if not cached and request.needs_prompt_logprobs:
            return ()
        hit = self._kv.match(request.request_id, request.tokens)
        # A fork of a running sample holds all of the prompt, be it in the index or not.
        return offload.behind(request, hit, *self._business()) if hit.tokens == cached else ()

    def _load(self, request: Request, host_blocks: tuple[int, ...]) -> Start:
        """Begin to load, unless others wait for the same or for all seats; then the request waits without blocks."""
        offload = self._roster.offload
        assert offload is not None
        full = offload.num_waiting >= len(self._roster.free_seats)
        if full and self._business() == (0, 0):
            # Nobody but this one is let start, it seems: one that is loaded and was not named makes way.
            full = not offload.reclaim()
        if full or offload.is_loading(host_blocks):
            self._kv.release(request.request_id)
        else:
            offload.begin(request, host_blocks)
        return Start.LATER

    def _business(self) -> tuple[int, int]:
        """Steps in flight, and requests that run."""
        return self._roster.in_flight, len(self._roster.running)


def chunk(decision: Decision, request: Request, left: int, room: int) -> int:
    """How much to compute of what is left of a prompt, in a step that has room for so many tokens."""
    room = min(left, room)
    return max(0, min(room, decision.chunk(request, room)))
