"""Scheduler: plans each step and applies its result.

There is no prefill phase and no decode phase. A request has known tokens and computed tokens, and each step computes
some of the difference. Several steps may be in flight: `plan` counts tokens that submitted steps will sample, and
`commit` corrects these counts.
"""

from collections.abc import Iterator
from math import inf
from typing import cast

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import NO_TOKEN_ALLOWED, InvalidRequestError, RequestTooLongError
from roseinfer.core.outputs import DraftRun, FinishReason, FirstToken, SchedulerStats, SequenceOutput, new_output
from roseinfer.core.plan import Row, RowResult, StepLimits, StepPlan, StepResult, TokenLogprobs
from roseinfer.core.promise import PROMPT_SPAN_S, Promise
from roseinfer.core.request import Request, Status, check_context
from roseinfer.core.slo import Cause
from roseinfer.kv.manager import KvManager
from roseinfer.sched.adapters import AdapterSlots
from roseinfer.sched.allocation import RowAllocator
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.offload import OffloadCosts, rows_seconds
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import (
    NO_LIMITS,
    Budgeting,
    Decision,
    FallbackDecision,
    LimitingDrafts,
    Policy,
    Preempting,
    Promising,
    Reporting,
    StepDone,
    View,
    WindowView,
    implements,
    no_load_s,
)
from roseinfer.sched.recent_share import RecentShare
from roseinfer.sched.roster import Roster
from roseinfer.sched.seating import Seating, chunk


class StepClock:
    """Measures how long each step takes, including the work of the host around it.

    `planned` and `done` are called for each step, in order; `paused` when nothing was planned.

    A step that runs alone lasts from its plan, or from the end of the previous step if the engine continued without a
    pause. A step planned while others are in flight lasts as long as the device reports: the host's work is hidden.
    """

    def __init__(self) -> None:
        # By step: when it was planned, and when it began; None if others were in flight.
        self._in_flight: dict[int, tuple[float, float | None]] = {}
        self._last_end_s: float | None = None  # None if nothing was left to do

    def planned(self, step: int, now_s: float) -> None:
        start_s = now_s if self._last_end_s is None else self._last_end_s
        self._in_flight[step] = now_s, None if self._in_flight else start_s

    def planned_at(self, step: int) -> float:
        """Return when a step in flight was planned."""
        return self._in_flight[step][0]

    def paused(self) -> None:
        self._last_end_s = None

    def done(self, step: int, now_s: float, device_s: float, *, more: bool) -> float:
        """Return the seconds that the step took. `more`: requests are still running."""
        _, start_s = self._in_flight.pop(step)
        self._last_end_s = now_s if more else None
        return device_s if start_s is None else max(device_s, now_s - start_s)


class Scheduler:
    """Owner of every live request, the seats and the KV bookkeeping of one engine. Single-threaded."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KvManager,
        policy: Policy,
        max_model_len: int,
        limits: StepLimits,
        drafting: Drafting | None = None,
        offloading: OffloadCosts | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`drafting`: adds drafts to steps; None = no step has any. `offloading`: costs of copies, used if the KV cache
        has blocks in host memory. `adapters`: slots for LoRA adapters; without any, no request may have an adapter.
        """
        self.config = config
        self._max_running = config.max_running
        self.kv = kv
        self._reporting = policy if isinstance(policy, Reporting) else None
        self._promising = policy if isinstance(policy, Promising) else None
        self.max_model_len = max_model_len
        self.limits = limits
        self.roster = Roster(config.seats, kv, policy, offloading, drafting, adapters)
        self.adapters = adapters
        # A draft head needs the state of the token before the first one that it sees. Recurrent states cannot go back a
        # token, so the head is without it there, which costs a guess at most.
        recomputed = 0 if drafting is None or drafting.head is None or kv.states is not None else 1
        self.seating = Seating(config, kv, self.roster, recomputed)
        self._allocator = RowAllocator(kv, self.roster)
        self.waiting = self.roster.waiting
        self.running = self.roster.running
        self.offload = self.roster.offload
        self._load_s = no_load_s if self.offload is None and adapters is None else self.seating.load_s
        self._snapshots = self.roster.snapshots
        self._liveness = self.roster.liveness
        self._waits = self.roster.waits
        self._requests = self._prompt_tokens = self._generation_tokens = 0
        self._last_tokens, self._last_rows, self._last_duration_s, self._last_end_s = 0, 0, 0.0, 0.0
        self._prompt_share = RecentShare(PROMPT_SPAN_S)
        self._clock = StepClock()
        self.integrity_errors = 0  # counted by the caller of `audit`

    # --- requests -----------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request. Raise `InvalidRequestError` if its id is in use or it could never run."""
        if request.request_id in self.roster.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        self.check_fits(request)
        self.roster.add(request, inf if self.roster.in_flight else self._last_end_s)
        self._requests += 1

    def check_fits(self, request: Request) -> None:
        """Raise `RequestTooLongError` unless the request could run alone."""
        check_context(request.prompt_len, request.params.max_tokens, self.max_model_len)
        wanted = request.prompt_len + request.params.max_tokens
        if wanted > self.kv.max_tokens:
            raise RequestTooLongError(f"{wanted} tokens exceed the KV cache of {self.kv.max_tokens} tokens")

    def abort(self, request_id: str, now_s: float) -> SequenceOutput | None:
        """End a request. Its seat and blocks are freed when no submitted step names it any more."""
        return self.finish(request_id, FinishReason.ABORT, now_s)

    def finish(
        self, request_id: str, reason: FinishReason, now_s: float, error: str | None = None
    ) -> SequenceOutput | None:
        """End a request for a `reason` from outside the scheduler. Return None if it has already ended."""
        request = self.roster.requests.get(request_id)
        if request is None or request.status is Status.FINISHED:
            return None
        return SequenceOutput(request_id, end=self.roster.finish(request, reason, now_s, error=error))

    def take_ended(self) -> list[SequenceOutput]:
        """Return the ends that `plan` decided since the last call."""
        return self.roster.take_ended()

    @property
    def has_work(self) -> bool:
        """True if a step could be planned, now or after the steps in flight."""
        return bool(self.running or self.waiting) or self._must_copy

    @property
    def _must_copy(self) -> bool:
        """True if copies are due even in a plan without rows."""
        if self.adapters is not None and self.adapters.must_plan:
            return True
        return self.offload is not None and self.offload.must_plan

    @property
    def policy(self) -> Policy:
        """The policy; it may be replaced between two plans."""
        return self.roster.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.roster.policy = policy

    @property
    def drafting(self) -> Drafting | None:
        """Source of drafts; it may be replaced between two requests."""
        return self.roster.drafting

    @drafting.setter
    def drafting(self, drafting: Drafting | None) -> None:
        self.roster.drafting = drafting

    @property
    def num_live(self) -> int:
        return len(self.roster.requests)

    # --- planning -----------------------------------------------------------------------------------------------
    @property
    def wants_known_tokens(self) -> bool:
        """True if the next plan is better after the commit of all earlier steps, since it may verify drafts."""
        return self.drafting is not None and self.drafting.wants_known_tokens(self.running.values())

    def plan(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute yet. See also `take_ended`."""
        roster, seating = self.roster, self.seating
        self._waits.begin(now_s)
        roster.expire(now_s)
        if self.adapters is not None:
            self.adapters.begin(now_s, seating.free_seats)
        seating.invalidate_ready()
        running = tuple(self.running.values())
        decision = self.policy.begin(self._view(now_s, running))
        if roster.reject(decision, now_s):
            seating.invalidate_ready()
        builder = PlanBuilder(roster.step, self._budget(decision), self.kv)
        preemptions_before = roster.preemptions
        self._preempt_named(builder, decision)
        if roster.preemptions > preemptions_before:
            running = tuple(self.running.values())
        livelock = self._liveness.livelock and bool(running)
        self._continue_running(builder, FallbackDecision() if livelock else decision, running)
        blocked_by: Cause | None = Cause.BLOCKS
        # No request starts in a plan that preempts, whether the policy named the request or blocks ran out.
        if roster.preemptions == preemptions_before and not livelock:
            seating.admit(builder, decision, now_s)
            if not len(builder) and not roster.in_flight and self.has_work and not self._must_copy:
                self._force_progress(builder, now_s)
            blocked_by = seating.blocked_by
        self._waits.update(decision, blocked_by, blocked_by or seating.exhausted(builder))
        if self.drafting is not None:
            self._add_drafts(self.drafting, builder, decision)
        if not len(builder) and not self._must_copy:
            self._clock.paused()
            return None
        if self.offload is not None:
            self.offload.add_copies(builder)
        if self.adapters is not None:
            builder.adapter_loads = self.adapters.take_loads()
        if self._snapshots is not None:
            builder.snapshots = self._snapshots.plan(builder.rows)
        if len(builder):
            self._liveness.rows_planned()
        self._clock.planned(roster.step, now_s)
        roster.step += 1
        plan = builder.build(roster.take_released(), roster.guided)
        self.limits.check(plan)
        return plan

    def _preempt_named(self, builder: PlanBuilder, decision: Decision) -> None:
        """Preempt the requests that the policy names, unless its preemptions have caused a livelock."""
        if self._liveness.livelock or not implements(type(decision), Preempting):
            return
        for request in tuple(cast(Preempting, decision).preemptions()):
            self._allocator.preempt(builder, request)

    def _budget(self, decision: Decision) -> int:
        """Return the most tokens that the step may have."""
        if implements(type(decision), Budgeting):
            return min(cast(Budgeting, decision).token_budget(), self.limits.max_tokens)
        return self.config.max_num_batched_tokens

    def _add_drafts(self, drafting: Drafting, builder: PlanBuilder, decision: Decision) -> None:
        """Let rows verify drafts in what the finished plan has left."""
        limits = implements(type(decision), LimitingDrafts)
        room = cast(LimitingDrafts, decision).draft_room() if limits else NO_LIMITS
        running, reserve = self.running.values(), self.seating.reserve
        drafting.add(builder, running, self.kv, reserve, self.limits.max_drafts, room)
        drafting.ask_head(builder, running, self.kv, reserve, self.limits.max_drafts)

    def _view(self, now_s: float, running: tuple[Request, ...]) -> View:
        return View(
            now_s,
            self.roster.step,
            self.seating.free_seats,
            self.seating.free_blocks,
            self.kv.block_size,
            self.config.max_num_batched_tokens,
            self.max_model_len,
            running,
            len(self.waiting),
            self.seating.ready,
            self.waiting.members,
            self.seating.uncached,
            self.waiting.leads,
            self._load_s,
            self.seating.seat_cause,
            tuple([WindowView(group.window, group.pool.num_free) for group in self.kv.windows]),
            () if self.adapters is None else self.adapters.sitting_out,
        )

    def _force_progress(self, builder: PlanBuilder, now_s: float) -> None:
        """Plan without the policy, because nothing is in flight and the policy schedules nothing.

        `sched/policy.py` states the rule.
        """
        decision = FallbackDecision()
        if self.running:
            if self._liveness.may_idle():
                return
            self._continue_running(builder, decision, tuple(self.running.values()))
        first = self.waiting.first_ready()
        if not len(builder) and first is not None and self.seating.free_seats:  # all seats may sit out
            self.seating.start_alone(builder, decision, first, now_s)
        if len(builder):
            self._liveness.report_stall(self.policy, "schedules nothing; planning one step without it")

    def _continue_running(self, builder: PlanBuilder, decision: Decision, running: tuple[Request, ...]) -> None:
        short: list[tuple[Request, int]] = []
        promised = 0
        rows = self._liveness.valid_rows(self.policy, decision.select(running), running)
        for request in rows if self.adapters is None else self.adapters.able(rows):
            room = builder.tokens_left - promised
            if room <= 0:
                break
            ahead = len(request.tokens) + request.pending
            if ahead >= request.max_len:
                continue  # its last token is in flight
            count = ahead - request.planned
            if count == 1 and request.planned < request.capacity:
                builder.add_next_token(request)
                continue
            if count == 0:
                continue  # its drafts are being verified: how many are right is not known yet
            if count > 1 and not (count := chunk(decision, request, count, room)):
                continue
            if request.planned + count <= request.capacity:
                builder.add_row(request, count)
            else:
                short.append((request, count))
                promised += count
        if short:
            self._allocator.grow(builder, decision, short)

    # --- results ------------------------------------------------------------------------------------------------
    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[SequenceOutput]:
        """Apply a completed step. Results of requests that ended meanwhile are dropped here, and only here."""
        assert plan.step == result.step and len(plan.rows) == len(result.rows), "a result belongs to one plan"
        self.catch_up()
        outputs: list[SequenceOutput] = []
        if plan.copies or plan.groups:
            self.kv.copies_done(plan.copies, [group.copies for group in plan.groups])
        requests, running = self.roster.requests, Status.RUNNING
        if self._snapshots is not None and plan.states is not None:
            self._snapshots.commit(plan, result, requests)
        block_mask = self.kv.block_size - 1
        extra_tokens, prompt_tokens = 0, self._prompt_tokens  # beyond one for each output; before this step
        self.roster.steps_done = plan.step + 1
        self._last_tokens, self._last_duration_s = plan.num_tokens, result.duration_s
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            name, _, start, count, _, sample, _, _, _, _ = row
            _, token_ids, logprobs, _, error, _ = row_result
            request = requests[name]
            request.in_flight -= 1
            # A decoding request that continues: the common case, inlined because it sets the engine's cost per step.
            if sample and count == 1 and start >= request.prompt_len and request.status is running and error is None:
                tokens = request.tokens
                if token_ids[0] not in request.stop_ids and len(tokens) + 1 < request.max_len:
                    request.pending -= 1
                    request.computed = end = start + 1
                    if not end & block_mask:
                        self.kv.register(name, tokens, end, request.prompt_len)
                    tokens.append(token_ids[0])
                    outputs.append(new_output((name, token_ids, logprobs, None, None, None, ())))
                    continue
            request.pending -= sample and not row.drafts
            settled = self._settle_row(request, row, row_result, self._clock.planned_at(plan.step), now_s)
            if settled is not None:
                outputs.append(settled)
                extra_tokens += len(settled.token_ids) - 1
        if result.ahead:
            cast(Drafting, self.drafting).made(plan, result, requests)
        self._generation_tokens += len(outputs) + extra_tokens
        if outputs:
            self._liveness.progressed()
        self._last_rows, self._last_end_s = len(plan.rows), now_s
        duration_s = self._clock.done(plan.step, now_s, result.duration_s, more=bool(self.running))
        if self.offload is not None:
            self.offload.done(plan, result)
            duration_s = rows_seconds(result, duration_s) if plan.rows else 0.0
        if self.adapters is not None:
            duration_s = self.adapters.step_done(plan, duration_s)
        if self._prompt_tokens > prompt_tokens:
            self._prompt_share.add(duration_s * (self._prompt_tokens - prompt_tokens) / plan.num_tokens, now_s)
        if self.drafting is not None:
            duration_s = self.drafting.step_done(plan, duration_s, result.duration_s)
        self.policy.observe(StepDone(plan, now_s, duration_s))
        return outputs

    def _settle_row(
        self, request: Request, row: Row, result: RowResult, planned_s: float, now_s: float
    ) -> SequenceOutput | None:
        """Apply the result of one row of a step planned at `planned_s`."""
        if request.status is Status.FINISHED:
            if request.in_flight == 0:
                self.roster.vacate(request)
            return None
        if result.error is not None:
            if not result.error.startswith(NO_TOKEN_ALLOWED):
                self.kv.invalidate(row.request_id)
            if not result.token_ids:
                end = self.roster.finish(request, FinishReason.ERROR, now_s, error=result.error)
                return SequenceOutput(row.request_id, end=end)
        if first := request.num_outputs == 0:
            self._waits.prefilled(request, planned_s, now_s)
            self._prompt_tokens += max(0, min(row.start + row.count, request.prompt_len) - row.start)
            request.chunks += row.count == 1  # the others were counted when they were planned
        kept = _up_to_end(request, result.token_ids)
        drafts: tuple[DraftRun, ...] = ()
        request.computed = row.start + row.count
        if row.drafts:
            request.computed = request.planned = row.start + len(kept)
            request.rowless += len(kept) - 1
            if kept:
                drafts = cast(Drafting, self.drafting).verified(request, row, len(kept))
        if request.params.max_tokens:
            request.tokens += kept
        if result.error is None:
            # Only up to the known tokens: K/V of wrong drafts must not become a prefix.
            self.kv.register(row.request_id, request.tokens, request.computed, request.prompt_len)
        scored = self._score_prompt(request, row, result)
        output = None
        if row.sample:
            output = self._report(request, kept, first, result, scored, drafts, now_s)
        elif scored:
            output = SequenceOutput(request.request_id, prompt_logprobs=scored)
        if request.in_flight == 0 and request.status is Status.WAITING:
            self.roster.vacate(request)  # preempted while this step ran
        return output

    def _score_prompt(self, request: Request, row: Row, result: RowResult) -> tuple[TokenLogprobs, ...] | None:
        """Return the prompt log probabilities not reported before; a restarted request computes them again."""
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
        drafts: tuple[DraftRun, ...],
        now_s: float,
    ) -> SequenceOutput:
        """Build the output for the sampled tokens that were `kept`, and end the request if they do.

        `first`: they are the first of the request. `drafts`: that the row verified.
        """
        assert kept or result.vector is not None, "a row that samples has a token or a vector, or an error"
        name, started, end = request.request_id, None, None
        if first:
            request.first_token_s = now_s
            why = self._waits.why(request, now_s, self.roster.steps_done)
            started = FirstToken(request.cached_tokens, request.arrival_s, request.scheduled_s, now_s, why)
            if request.params.max_tokens == 0:
                reason = FinishReason.LENGTH if result.vector is None else FinishReason.STOP
                end = self.roster.finish(request, reason, now_s)._replace(vector=result.vector)
                return SequenceOutput(name, (), None, scored, started, end)
        if kept[-1] in request.stop_ids:
            end = self.roster.finish(request, FinishReason.STOP, now_s, stop_token=kept[-1])
        elif len(request.tokens) >= request.max_len:
            end = self.roster.finish(request, FinishReason.LENGTH, now_s)
        elif result.error is not None:
            end = self.roster.finish(request, FinishReason.ERROR, now_s, error=result.error)
        logprobs = result.logprobs[: len(kept)] if result.logprobs is not None else None
        return new_output((name, kept, logprobs, scored, started, end, drafts))

    def catch_up(self) -> None:
        """Do what no plan needs at once: learn from verified drafts. Best called while a step runs."""
        if self.drafting is not None:
            self.drafting.learn()

    # --- inspection ---------------------------------------------------------------------------------------------
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            step=self.roster.step,
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_used=self.kv.num_used,
            blocks_total=self.kv.num_blocks,
            prefix_queries=self.seating.prefix_queries,
            prefix_hits=self.seating.prefix_hits,
            preemptions=self.roster.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            step_tokens=self._last_tokens,
            step_duration_s=self._last_duration_s,
            steps_done=self.roster.steps_done,
            policy=self._reporting.stats() if self._reporting else None,
            policy_stalls=self._liveness.stalls,
            policy_faults=self._liveness.faults,
            integrity_errors=self.integrity_errors,
            step_rows=self._last_rows,
            offload=None if self.offload is None else self.offload.stats(),
            requests=self._requests,
            drafts=() if self.drafting is None else self.drafting.stats(),
            states=None if self._snapshots is None else self._snapshots.stats(),
            adapters=None if self.adapters is None else self.adapters.stats(),
        )

    def promise(self, now_s: float) -> Promise:
        """Return what the engine could still promise, as of the step planned at `now_s`.

        Without a `Promising` policy these are counts only.
        """
        running, waiting = len(self.running), len(self.waiting)
        seats = min(self.seating.free_seats, self._max_running - running)
        counts = Promise(
            now_s,
            steps=self.roster.step,
            running=running,
            waiting=waiting,
            best_effort=waiting,
            free_seats=max(0, seats),
            free_blocks=self.kv.num_blocks - self.kv.num_used,
            blocks=self.kv.num_blocks,
            oldest_wait_s=self._oldest_wait_s(now_s),
            prompt_share=self._prompt_share.at(now_s),
        )
        if self._promising is None:
            return counts
        try:
            return self._promising.promise(counts, self.kv.block_size, self.seating.uncached)
        except Exception as error:  # outputs do not depend on it
            self._liveness.report_fault(self.policy, f"failed in promise() ({type(error).__name__}: {error})")
            return counts

    def _oldest_wait_s(self, now_s: float) -> float:
        """Return `Promise.oldest_wait_s` from the head of the queue and the requests that started last.

        Running requests are in their starting order, so those without a token are the last ones. A full scan would cost
        as much as the plan.
        """
        first = next(iter(self.waiting), None)
        arrival_s = now_s if first is None or first.arrival_s > now_s else first.arrival_s
        for request in reversed(self.running.values()):
            if request.num_outputs:
                break
            if request.arrival_s < arrival_s:
                arrival_s = request.arrival_s
        return now_s - arrival_s

    def check_integrity(self) -> None:
        """Raise AssertionError if seats, queues or blocks disagree."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """Check as `check_integrity` does, in pieces of 1 to 2 ms. Nothing may change meanwhile."""
        yield from self.kv.audit()
        self.roster.check_integrity()


def _up_to_end(request: Request, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sampled tokens up to the one that ends the request: right drafts may reach beyond its end."""
    room = request.max_len - len(request.tokens)
    for count, token in enumerate(token_ids, start=1):
        if count == room or token in request.stop_ids:
            return token_ids[:count]
    return token_ids
