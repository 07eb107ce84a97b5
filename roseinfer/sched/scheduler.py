"""The scheduler's mechanism: which tokens of which request the next step computes, and what a step's result changes.

There is no prefill phase and no decode phase: a request has known tokens and computed tokens, and every step closes
some of the gap. Several steps may be in flight: `plan` counts on tokens that submitted steps will sample, `commit`
settles what really happened.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from math import inf
from typing import cast

from roseinfer.core.config import SchedulerConfig
from roseinfer.core.errors import InvalidRequestError, RequestTooLongError
from roseinfer.core.events import Admitted, Ended, Queued, StepDone
from roseinfer.core.outputs import (
    End,
    FinishReason,
    RequestOutput,
    RequestTimes,
    SchedulerStats,
    Started,
    new_output,
)
from roseinfer.core.plan import Admission, Row, RowResult, StepLimits, StepPlan, StepResult, TokenLogprobs
from roseinfer.core.promise import Promise
from roseinfer.core.request import Request, Status, check_context
from roseinfer.core.slo import Cause, Rejection
from roseinfer.kv.manager import KvManager, PrefixHit
from roseinfer.sched.cost import StepClock
from roseinfer.sched.draft import StepDraft
from roseinfer.sched.drafter import Drafter, add_drafts
from roseinfer.sched.liveness import Liveness
from roseinfer.sched.offload import Offload, Offloading, rows_seconds
from roseinfer.sched.policy import (
    Budgeting,
    Decision,
    Policy,
    Promising,
    Reporting,
    Unconditional,
    Verdict,
    View,
    Yielding,
    at_once,
    follows,
    rejectable,
)
from roseinfer.sched.queue import Expiries, WaitingQueue
from roseinfer.sched.waits import Waits

# Share of the cache kept free when a request is admitted beside others, so that they can grow before one must yield.
ADMISSION_RESERVE = 0.01


class Start(Enum):
    """What came of a waiting request that was to start."""

    NOW = "now"
    LATER = "later"  # its prefix is to be loaded first
    NO_ROOM = "no room"


class Scheduler:
    """Owns every live request, the seats and the KV bookkeeping of one engine. Single-threaded."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KvManager,
        policy: Policy,
        max_model_len: int,
        limits: StepLimits,
        drafter: Drafter | None = None,
        offloading: Offloading | None = None,
    ) -> None:
        """offloading: what copies cost, if the KV cache has blocks in host memory."""
        self.config = config
        self.kv = kv
        self.policy = policy
        self._reporting = policy if isinstance(policy, Reporting) else None
        self._promising = policy if isinstance(policy, Promising) else None
        self.max_model_len = max_model_len
        self.limits = limits
        self.drafter = drafter
        self._guided: set[str] = set()  # live requests that have a guide
        self.waiting = WaitingQueue(self._awaits_parent)
        self.running: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}
        self._free_seats = list(range(config.seats - 1, -1, -1))
        self._released: list[int] = []
        self._expiries = Expiries(self._requests)
        self._ended: list[RequestOutput] = []
        self._reserve = int(kv.num_blocks * ADMISSION_RESERVE)
        self._step = 0
        self._prefix_queries = self._prefix_hits = 0
        self._preemptions = self._prompt_tokens = self._generation_tokens = 0
        self._steps_done, self._last_tokens, self._last_rows, self._last_duration_s = 0, 0, 0, 0.0
        self._last_end_s = 0.0
        self._clock = StepClock()
        self._ready: list[Request] | None = None  # this step's snapshot of who could start, once somebody asked
        self._liveness = Liveness(config.seats)
        self._waits = Waits(policy, self.waiting, self._liveness)
        self._lacking: Cause | None = None  # of those that the policy lets start in this step, the first that cannot
        self.integrity_errors = 0  # counted by whoever audits
        self.offload: Offload | None = None
        if kv.host is not None:
            self.offload = Offload(kv, kv.host, offloading or Offloading(), self._recheck)

    # --- requests come and go -----------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request. Raises if it could never run, or its id is in use."""
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        self.check_fits(request)
        self._requests[request.request_id] = request
        if request.guided:
            self._guided.add(request.request_id)
        self.kv.open(request.request_id, request.meta.cache_salt, request.keys)
        if request.resumed:
            self.waiting.add_first(request)
        else:
            self.waiting.add(request)
        self._expiries.add(request)
        self._waits.add(request, inf if self._step > self._steps_done else self._last_end_s)
        self.policy.observe(Queued(request))

    def check_fits(self, request: Request) -> None:
        """Raise `RequestTooLongError` unless the request could run alone."""
        check_context(request.prompt_len, request.params.max_tokens, self.max_model_len)
        wanted = request.prompt_len + request.params.max_tokens
        if wanted > self.kv.max_tokens:
            raise RequestTooLongError(f"{wanted} tokens exceed the KV cache of {self.kv.max_tokens} tokens")

    def abort(self, request_id: str, now_s: float) -> RequestOutput | None:
        """End a request; what it holds is free at once, or when the last submitted step that names it completes."""
        return self.finish(request_id, FinishReason.ABORT, now_s)

    def finish(
        self, request_id: str, reason: FinishReason, now_s: float, error: str | None = None
    ) -> RequestOutput | None:
        """End a request for a `reason` that the scheduler cannot see; as `abort`. None: it has ended already."""
        request = self._requests.get(request_id)
        if request is None or request.status is Status.FINISHED:
            return None
        return RequestOutput(request_id, end=self._finish(request, reason, now_s, error=error))

    @property
    def has_work(self) -> bool:
        """Whether a step could be planned, now or once those in flight are done."""
        return bool(self.running or self.waiting) or (self.offload is not None and self.offload.must_plan)

    @property
    def num_live(self) -> int:
        return len(self._requests)

    # --- planning -----------------------------------------------------------------------------------------------
    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute (yet). `take_ended` says who ended meanwhile."""
        self._waits.begin(now_s)
        for request in self._expiries.due(now_s):
            self._expire(request, now_s)
        self._ready = None
        running = tuple(self.running.values())
        decision = self.policy.begin(self._view(now_s, running))
        self._reject_all(decision, now_s)
        draft = StepDraft(self._step, self._budget(decision), self.kv)
        offload = self.offload
        preemptions = self._preemptions
        if follows(type(decision), Yielding):
            running = self._make_room(draft, cast(Yielding, decision), running)
        thrashing = self._liveness.thrashing and bool(running)
        self._continue_running(draft, Unconditional() if thrashing else decision, running)
        self._lacking = Cause.BLOCKS
        # After a preemption nobody starts: the blocks are for those that lacked some.
        if self._preemptions == preemptions and not thrashing:
            self._lacking = self._exhausted(draft)
            if self.waiting and self._lacking is None:
                self._admit_waiting(draft, decision, now_s)
            idle = not len(draft) and self._step == self._steps_done
            if idle and self.has_work and not (offload is not None and offload.must_plan):
                self._go_on_regardless(draft, now_s)
        self._waits.explain(decision, self._lacking, self._lacking or self._exhausted(draft))
        if self.drafter is not None:
            add_drafts(self.drafter, draft, self.running.values(), self.kv, self._reserve)
        if not len(draft) and not (offload is not None and offload.must_plan):
            self._clock.paused()
            return None
        if offload is not None:
            offload.fill(draft)
        self._liveness.planned()
        self._clock.planned(self._step, now_s)
        self._step += 1
        released, self._released = self._released, []
        plan = draft.freeze(released, self._guided)
        self.limits.check(plan)
        return plan

    def _budget(self, decision: Decision) -> int:
        """Tokens of the step."""
        if follows(type(decision), Budgeting):
            return min(cast(Budgeting, decision).token_budget(), self.limits.max_tokens)
        return self.config.max_num_batched_tokens

    def _view(self, now_s: float, running: tuple[Request, ...]) -> View:
        return View(
            now_s,
            self._step,
            len(self._free_seats),
            max(0, self._free_blocks() - self._reserved_blocks()),
            self.kv.block_size,
            self.config.max_num_batched_tokens,
            self.max_model_len,
            running,
            len(self.waiting),
            self._ready_now,
            self.waiting.members,
            self._uncached,
            self.waiting.leads,
            at_once if self.offload is None else self._load_s,
        )

    def _free_blocks(self) -> int:
        """KV blocks for whoever starts."""
        return self.kv.num_free + (0 if self.offload is None else self.offload.blocks_on_call)

    def _ready_now(self) -> Sequence[Request]:
        if self._ready is None:
            self._ready = self.waiting.ready()
        return self._ready

    def _go_on_regardless(self, draft: StepDraft, now_s: float) -> None:
        """Nothing is in flight, and the policy lets nobody do anything: see `sched/policy.py` for the rule."""
        decision = Unconditional()
        if self.running:
            if self._liveness.may_hold_back():
                return
            self._continue_running(draft, decision, tuple(self.running.values()))
        first = self.waiting.first_ready()
        if not len(draft) and first is not None and self._start(draft, decision, first, False) is Start.NOW:
            self._seat_taken(first, now_s)
        if len(draft):
            self._liveness.stalled(self.policy, "lets nobody do anything; the engine goes on without it")

    def _continue_running(self, draft: StepDraft, decision: Decision, running: tuple[Request, ...]) -> None:
        short: list[tuple[Request, int]] = []
        promised = 0
        for request in self._liveness.rows(self.policy, decision.select(running), running):
            room = draft.tokens_left - promised
            if room <= 0:
                break
            ahead = len(request.tokens) + request.pending
            if ahead >= request.max_len:
                continue  # its last token is on the way
            count = ahead - request.planned
            if count == 1 and request.planned < request.capacity:
                draft.take_next(request)
                continue
            if count == 0:
                continue  # its drafts are being verified: who knows how far it will be
            if count > 1:
                count = self._chunk(decision, request, count, room)
                if count == 0:
                    continue
            if request.planned + count <= request.capacity:
                draft.take(request, count)
            else:
                short.append((request, count))
                promised += count
        if short:
            self._grow(draft, decision, short)

    def _chunk(self, decision: Decision, request: Request, left: int, room: int) -> int:
        """How much of a prompt to compute: all that is left if prompts are not chunked, room or not."""
        if not self.config.enable_chunked_prefill:
            return left
        room = min(left, room)
        return max(0, min(room, decision.chunk(request, room)))

    def _grow(self, draft: StepDraft, decision: Decision, short: list[tuple[Request, int]]) -> None:
        """Rows that need new blocks or a copy-on-write: all at once if the pool has them, else one by one."""
        grown = self.kv.grow_many([(r.request_id, r.planned + count) for r, count in short])
        if grown is not None:
            for (request, count), growth in zip(short, grown, strict=True):
                request.capacity = self.kv.capacity(request.request_id)
                draft.take(request, count, growth)
            return
        for request, count in short:
            if request.status is Status.RUNNING:
                self._grow_or_preempt(draft, decision, request, count)

    def _grow_or_preempt(self, draft: StepDraft, decision: Decision, request: Request, count: int) -> None:
        while True:
            upto = request.planned + count
            growth = self.kv.grow(request.request_id, upto)
            if growth is not None:
                request.capacity = self.kv.capacity(request.request_id)
                draft.take(request, count, growth)
                return
            if self.kv.growth_cost(request.request_id, upto) <= self.kv.num_free + self._blocks_coming():
                return  # enough is on its way: this row sits out a step
            if self.offload is not None and self.offload.reclaim(loads=True):
                continue
            victim = decision.victim(tuple(self.running.values()))
            if victim is None:
                return
            if self.running.get(victim.request_id) is not victim:
                self._liveness.fault(self.policy, "took blocks from a request that does not run")
                return
            self._preempt(draft, victim)
            if victim is request:
                return

    def _blocks_coming(self) -> int:
        """Blocks of preempted and ended requests that submitted steps still name (an upper bound: some are shared)."""
        leaving = (r for r in self._requests.values() if r.seat is not None and r.status is not Status.RUNNING)
        stored = 0 if self.offload is None else self.offload.blocks_coming
        return stored + sum(len(self.kv.table(r.request_id)) for r in leaving)

    def _make_room(self, draft: StepDraft, decision: Yielding, running: tuple[Request, ...]) -> tuple[Request, ...]:
        """Preempt those that yield. Returns who still runs."""
        yielding = tuple(decision.yields())
        if not yielding:
            return running
        for request in yielding:
            if self.running.get(request.request_id) is request:
                self._preempt(draft, request)
            else:
                self._liveness.fault(self.policy, "took blocks from a request that does not run")
        return tuple(self.running.values())

    def _preempt(self, draft: StepDraft, victim: Request) -> None:
        """Send a running request back to the head of the queue; it will be computed again from its tokens."""
        if victim in draft:
            draft.drop(victim)
        self._waits.preempted(victim, self._step)
        del self.running[victim.request_id]
        victim.status = Status.WAITING
        victim.preemptions += 1
        self._preemptions += 1
        self._liveness.preempted(self.policy)
        self.waiting.add_first(victim)
        self.policy.observe(Queued(victim))
        if victim.in_flight == 0:
            self._vacate(victim)

    # --- admission ----------------------------------------------------------------------------------------------
    def _admit_waiting(self, draft: StepDraft, decision: Decision, now_s: float) -> None:
        started: list[Request] = []
        for lead in decision.order(self._ready_now()):
            if not self.waiting.can_start(lead):
                self._liveness.fault(self.policy, "started a request twice, or one that could not start")
            elif not self._start_entry(draft, decision, lead, started):
                break
        for request in started:
            self._seat_taken(request, now_s)

    def _exhausted(self, draft: StepDraft) -> Cause | None:
        """What the step has no more of, so that nobody else can start in it."""
        if not self._free_seats:
            return Cause.SEATS
        return Cause.BUDGET if draft.tokens_left <= 0 else None

    def _start_entry(self, draft: StepDraft, decision: Decision, lead: Request, started: list[Request]) -> bool:
        """Start a waiting request and its samples that could start with it, as far as the policy admits them.

        False if nobody else can start in this step.
        """
        for request in self.waiting.members(lead):
            verdict = decision.admit(request)
            if verdict is Verdict.SKIP:
                return True
            if verdict is Verdict.STOP:
                return False
            self._lacking = self._exhausted(draft)
            if self._lacking is not None:
                return False
            start = self._start(draft, decision, request, bool(started))
            if start is not Start.NOW:
                return start is Start.LATER
            started.append(request)
        return True

    def _reject_all(self, decision: Decision, now_s: float) -> None:
        """Turn requests away, and with each the samples that wait for it to compute their prompt."""
        for request, rejection in tuple(decision.rejections()):
            if request not in self.waiting or not rejectable(request):
                self._liveness.fault(self.policy, "turned away a request that does not wait, or has begun")
                continue
            for refused in self.waiting.family(request):
                end = self._finish(refused, FinishReason.REJECTED, now_s, rejection=rejection)
                self._ended.append(RequestOutput(refused.request_id, end=end))
            self._ready = None

    def _expire(self, request: Request, now_s: float) -> None:
        """End a request whose time to live is over."""
        end = self._finish(request, FinishReason.TIMEOUT, now_s)
        self._ended.append(RequestOutput(request.request_id, end=end))

    def take_ended(self) -> list[RequestOutput]:
        """The ends that `plan` decided, each once."""
        ended, self._ended = self._ended, []
        return ended

    def _reserved_blocks(self) -> int:
        return self._reserve if self.running else 0

    def _uncached(self, request: Request) -> int:
        """Tokens that a waiting request would compute before it can sample: at least the last one."""
        known = len(request.tokens)
        if request.params.prompt_logprobs is not None and request.unscored:
            return known
        parent = None if request.num_outputs else request.fork_of
        if parent is not None and (parent in self.running or self._awaits_parent(request)):
            return 1
        hit = self.kv.match(request.request_id, request.tokens)
        cached = hit.tokens
        if self.offload is not None:
            cached += self.kv.block_size * len(self.offload.behind(request, hit, *self._business()))
        return known - min(cached, known - 1)

    def _load_s(self, request: Request) -> float:
        """Seconds until what is loaded for a waiting request is there, if it begins now."""
        assert self.offload is not None
        known = len(request.tokens)
        if request.fork_of is not None or (request.params.prompt_logprobs is not None and request.unscored):
            return 0.0
        hit = self.kv.match(request.request_id, request.tokens)
        blocks = len(self.offload.behind(request, hit, *self._business())) if hit.tokens < known else 0
        return self.offload.seconds(blocks, *self._business()) if blocks else 0.0

    def _business(self) -> tuple[int, int]:
        """Steps in flight, and requests that run."""
        return self._step - self._steps_done, len(self.running)

    def _awaits_parent(self, request: Request) -> bool:
        """A fork waits until its parent has computed the prompt, so that it need not be computed twice."""
        if request.fork_of is None:
            return False
        parent = self._requests.get(request.fork_of)
        return parent is not None and parent.status is not Status.FINISHED and parent.computed < parent.prompt_len

    def _start(self, draft: StepDraft, decision: Decision, request: Request, others_started: bool) -> Start:
        """Seat a waiting request and plan its first row, or have what it needs loaded first. If there is no room for
        that nothing is taken.
        """
        request_id, known, offload = request.request_id, len(request.tokens), self.offload
        loaded = offload.take_back(request) if offload is not None else 0
        cached = self._attach_cached(request)
        hosts = self._hosts_behind(request, cached) if offload is not None and not loaded else ()
        start = min(cached, known - 1)
        count = 0 if hosts else self._first_chunk(draft, decision, request, known - start, others_started)
        if not (hosts or count):
            self._lacking = Cause.BUDGET
        elif not self._has_room(draft, request_id, known):
            self._lacking = Cause.BLOCKS
        elif hosts:
            return self._load(request, hosts)
        else:
            self._seat(draft, request, start, cached, count)
            self._prefix_queries += known
            # Of a whole prompt that was loaded the last token is computed again, and what was distrusted since is, too.
            self._prefix_hits += max(0, start - loaded)
            if offload is not None:
                offload.started(request, cached, loaded)
            return Start.NOW
        if offload is None or not offload.keep(request, loaded):
            self.kv.release(request_id)
        return Start.NO_ROOM

    def _seat(self, draft: StepDraft, request: Request, start: int, cached: int, count: int) -> None:
        """Give a request a seat and its first row, of `count` tokens from `start` on."""
        request_id = request.request_id
        table = self.kv.table(request_id)
        growth = self.kv.grow(request_id, start + count) if start + count > cached else None
        request.capacity = self.kv.capacity(request_id)
        request.seat = self._free_seats.pop()
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

    def _has_room(self, draft: StepDraft, request_id: str, known: int) -> bool:
        """Whether a request that has attached its hit finds blocks for all that is known of it."""
        wanted = self.kv.growth_cost(request_id, known) + (self._reserve if self.running or len(draft) else 0)
        while wanted > self.kv.num_free:
            if self.offload is None or not self.offload.reclaim():
                return False
        return True

    def _hosts_behind(self, request: Request, cached: int) -> tuple[int, ...]:
        """The host blocks that are to be loaded behind what the request has attached."""
        assert self.offload is not None
        if not cached and request.params.prompt_logprobs is not None and request.unscored:
            return ()
        hit = self.kv.match(request.request_id, request.tokens)
        # A fork of a running sample holds all of the prompt, be it in the index or not.
        return self.offload.behind(request, hit, *self._business()) if hit.tokens == cached else ()

    def _load(self, request: Request, hosts: tuple[int, ...]) -> Start:
        """Begin to load, unless others wait for the same or for all seats; then the request waits without blocks."""
        offload = self.offload
        assert offload is not None
        full = offload.num_waiting >= len(self._free_seats)
        if full and not self.running and self._step == self._steps_done:
            # Nobody but this one is let start, it seems: one that is loaded and was not named makes way.
            full = not offload.reclaim()
        if full or offload.arriving(hosts):
            self.kv.release(request.request_id)
        else:
            offload.begin(request, hosts)
        return Start.LATER

    def _recheck(self, request: Request) -> None:
        """A request has begun to wait for a load, or waits for it no longer."""
        self.waiting.recheck(request)
        self._waits.loads(request)

    def _attach_cached(self, request: Request) -> int:
        """Give the request what the cache holds of its tokens; returns how many tokens that is."""
        if request.params.prompt_logprobs is not None and request.unscored:
            return 0  # every prompt position has to be computed for its logits
        parent = self._requests.get(request.fork_of) if request.fork_of else None
        # Not from a parent that ended: it may have failed, and then its blocks are not to be trusted.
        if parent is not None and (parent.seat is None or parent.status is Status.FINISHED):
            parent = None
        if parent is not None and parent.computed >= request.prompt_len and request.num_outputs == 0:
            self.kv.fork(parent.request_id, request.request_id, request.prompt_len)
            return request.prompt_len
        hit: PrefixHit = self.kv.match(request.request_id, request.tokens)
        self.kv.attach(request.request_id, hit)
        return hit.tokens

    def _first_chunk(
        self, draft: StepDraft, decision: Decision, request: Request, left: int, others_started: bool
    ) -> int:
        """Tokens of a waiting request's first row, 0 if it has to wait.

        Without chunking, a prompt that exceeds the budget runs when no other starts in the same step.
        """
        if self.config.enable_chunked_prefill:
            return self._chunk(decision, request, left, draft.tokens_left)
        fits = left <= draft.tokens_left
        alone = left > self.config.max_num_batched_tokens and not others_started
        return left if fits or alone else 0

    def _seat_taken(self, request: Request, now_s: float) -> None:
        self.waiting.discard(request)
        self.running[request.request_id] = request
        request.status = Status.RUNNING
        if request.preemptions == 0:
            request.scheduled_s = now_s
        self._waits.started(request, self._step)
        self.policy.observe(Admitted(request.request_id, now_s, request.cached_tokens))

    # --- results ------------------------------------------------------------------------------------------------
    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[RequestOutput]:
        """Settle a completed step. Results of requests that ended meanwhile are dropped here, and only here."""
        assert plan.step == result.step and len(plan.rows) == len(result.rows), "a result belongs to one plan"
        outputs: list[RequestOutput] = []
        if plan.copies:
            self.kv.copies_done(plan.copies)
        requests, running = self._requests, Status.RUNNING
        block_mask = self.kv.block_size - 1
        several = 0  # tokens beyond one for each output
        self._steps_done, self._last_tokens, self._last_duration_s = plan.step + 1, plan.num_tokens, result.duration_s
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            name, _, start, count, _, sample, _, _, _, _ = row
            _, token_ids, logprobs, _, error = row_result
            request = requests[name]
            request.in_flight -= 1
            # A decoding request that goes on: the common case, written out because it sets the engine's cost per step.
            if sample and count == 1 and start >= request.prompt_len and request.status is running and error is None:
                tokens = request.tokens
                if token_ids[0] not in request.stop_ids and len(tokens) + 1 < request.max_len:
                    request.pending -= 1
                    request.computed = end = start + 1
                    if not end & block_mask:
                        self.kv.register(name, tokens, end, request.prompt_len)
                    tokens.append(token_ids[0])
                    outputs.append(new_output((name, token_ids, logprobs, None, None, None)))
                    continue
            request.pending -= sample and not row.drafts
            settled = self._settle_row(request, row, row_result, now_s)
            if settled is not None:
                outputs.append(settled)
                several += len(settled.token_ids) - 1
        self._generation_tokens += len(outputs) + several
        if outputs:
            self._liveness.got_further()
        self._last_rows, self._last_end_s = len(plan.rows), now_s
        duration_s = self._clock.done(plan.step, now_s, result.duration_s, more=bool(self.running))
        if self.offload is not None:
            self.offload.done(plan, result)
            duration_s = rows_seconds(result, duration_s) if plan.rows else 0.0
        self.policy.observe(StepDone(plan, now_s, duration_s))
        return outputs

    def _settle_row(self, request: Request, row: Row, result: RowResult, now_s: float) -> RequestOutput | None:
        if request.status is Status.FINISHED:
            if request.in_flight == 0:
                self._vacate(request)
            return None
        if result.error is not None:
            self.kv.distrust(row.request_id)
            if not result.token_ids:
                end = self._finish(request, FinishReason.ERROR, now_s, error=result.error)
                return RequestOutput(row.request_id, end=end)
        first = request.num_outputs == 0
        if first:
            self._prompt_tokens += max(0, min(row.start + row.count, request.prompt_len) - row.start)
            request.chunks += row.count == 1  # the others were counted when they were planned
        kept = _kept(request, result.token_ids)
        request.computed = row.start + row.count
        if row.drafts:
            request.computed = request.planned = row.start + len(kept)
            request.rowless += len(kept) - 1
        if request.params.max_tokens:
            request.tokens += kept
        if result.error is None:
            # Up to the tokens that are known now: what wrong drafts have left behind is nobody's prefix.
            self.kv.register(row.request_id, request.tokens, request.computed, request.prompt_len)
        scored = self._score_prompt(request, row, result)
        output = None
        if row.sample:
            output = self._report(request, kept, first, result, scored, now_s)
        elif scored:
            output = RequestOutput(request.request_id, prompt_logprobs=scored)
        if request.in_flight == 0 and request.status is Status.WAITING:
            self._vacate(request)  # preempted while this step ran
        return output

    def _score_prompt(self, request: Request, row: Row, result: RowResult) -> tuple[TokenLogprobs, ...] | None:
        """The prompt log probabilities not reported before: a restarted request computes them again."""
        if result.prompt_logprobs is None:
            return None
        scored = result.prompt_logprobs[max(0, request.prompt_scored - row.start) :]
        request.prompt_scored += len(scored)
        return scored

    def _report(
        self,
        request: Request,
        kept: tuple[int, ...],
        first: bool,
        result: RowResult,
        scored: tuple[TokenLogprobs, ...] | None,
        now_s: float,
    ) -> RequestOutput:
        """What to say of sampled tokens that were `kept`, and whether they end the request. `first`: the first ones."""
        assert kept, "a row that samples has a token, or an error"
        name, started, end = request.request_id, None, None
        if first:
            request.first_token_s = now_s
            why = self._waits.why(request, self._step)
            started = Started(request.cached_tokens, request.arrival_s, request.scheduled_s, now_s, why)
            if request.params.max_tokens == 0:
                return RequestOutput(name, (), None, scored, started, self._finish(request, FinishReason.LENGTH, now_s))
        if kept[-1] in request.stop_ids:
            end = self._finish(request, FinishReason.STOP, now_s, stop_token=kept[-1])
        elif len(request.tokens) >= request.max_len:
            end = self._finish(request, FinishReason.LENGTH, now_s)
        elif result.error is not None:
            end = self._finish(request, FinishReason.ERROR, now_s, error=result.error)
        logprobs = result.logprobs[: len(kept)] if result.logprobs is not None else None
        return RequestOutput(name, kept, logprobs, scored, started, end)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now_s: float,
        *,
        stop_token: int | None = None,
        error: str | None = None,
        rejection: Rejection | None = None,
    ) -> End:
        self.running.pop(request.request_id, None)
        self.waiting.discard(request)
        if self.offload is not None:
            self.offload.forget(request)
        self._liveness.got_further()
        request.status = Status.FINISHED
        # Nothing of it is in the steps that were planned when its last token was on the way.
        why = self._waits.ended(request, now_s, self._steps_done if reason is FinishReason.LENGTH else self._step)
        self._guided.discard(request.request_id)
        if request.in_flight == 0:
            self._vacate(request)
        self.policy.observe(Ended(request.request_id, now_s, reason, request.num_outputs))
        times = RequestTimes(request.arrival_s, request.scheduled_s, request.first_token_s, now_s)
        return End(reason, times, stop_token, error, request.preemptions, rejection, why)

    def _vacate(self, request: Request) -> None:
        """No submitted step names the request any more: its seat and blocks can be reused."""
        if request.seat is not None:
            self._free_seats.append(request.seat)
            self._released.append(request.seat)
        if request.status is Status.FINISHED:
            request.seat = None
            self.kv.close(request.request_id)
            del self._requests[request.request_id]
        else:
            if self.offload is not None:
                self.offload.losing(request)
            self.kv.release(request.request_id)
            request.restart()

    # --- looking in ---------------------------------------------------------------------------------------------
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            step=self._step,
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_used=self.kv.num_blocks - self.kv.num_free,
            blocks_total=self.kv.num_blocks,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            step_tokens=self._last_tokens,
            step_duration_s=self._last_duration_s,
            steps_done=self._steps_done,
            policy=self._reporting.stats() if self._reporting else None,
            policy_stalls=self._liveness.stalls,
            policy_faults=self._liveness.faults,
            integrity_errors=self.integrity_errors,
            step_rows=self._last_rows,
            offload=None if self.offload is None else self.offload.stats(),
        )

    def promise(self, now_s: float) -> Promise:
        """What the engine could still promise, as of a step that was planned at `now_s`; counts only, if the policy
        knows no more.
        """
        running, waiting = len(self.running), len(self.waiting)
        seats = min(len(self._free_seats), self.config.max_running - running)
        counts = Promise(
            now_s,
            steps=self._step,
            running=running,
            waiting=waiting,
            best_effort=waiting,
            free_seats=max(0, seats),
            free_blocks=self.kv.num_free,
            blocks=self.kv.num_blocks,
        )
        if self._promising is None:
            return counts
        try:
            return self._promising.promise(counts, self.kv.block_size, self._uncached)
        except Exception as error:  # the policy's: nobody's output depends on it
            self._liveness.fault(self.policy, f"cannot say what it promises ({type(error).__name__}: {error})")
            return counts

    def check_integrity(self) -> None:
        """Raise AssertionError if seats, queues or blocks disagree."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """`check_integrity` in pieces of a millisecond or two; nothing may change meanwhile."""
        yield from self.kv.audit()
        seated = [r.seat for r in self._requests.values() if r.seat is not None]
        assert sorted(seated + self._free_seats) == list(range(self.config.seats)), "seats lost or doubled"
        assert all(r.status is Status.RUNNING and r.seat is not None for r in self.running.values())
        assert all(r.status is Status.WAITING for r in self.waiting)
        assert not any(r in self.waiting for r in self.running.values())
        self.waiting.check_integrity()
        if self.offload is not None:
            self.offload.check_integrity()
        for r in self._requests.values():
            # The token that a failed request's next step was planned on never came.
            assert r.status is Status.FINISHED or r.computed <= r.planned <= len(r.tokens) + r.pending, r
            assert 0 <= r.pending <= r.in_flight, r


def _kept(request: Request, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Sampled tokens up to the one that ends the request, if one does: right drafts may reach beyond its end."""
    room = request.max_len - len(request.tokens)
    for count, token in enumerate(token_ids, start=1):
        if count == room or token in request.stop_ids:
            return token_ids[:count]
    return token_ids
