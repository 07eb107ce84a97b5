"""Slack: each step lasts as long as the most urgent running request can afford, and only what fits is admitted.

The deadline of a token counts from the request's real first token at its TPOT objective, less a learnt margin. Tokens
ahead of schedule are slack that later steps may use. A step demotes requests that can no longer meet their objectives
(`deadlines`), rejects waiting ones that cannot be in time, starts those that fit (`admission`), and decides how long it
is, which requests decode, and which prompts it computes (`step`). docs/explanation/slack.md explains each decision.

While no request has objectives, plans are those of fifo, with `BurstRotation` and `BurstBudget` for a queue of prompts.
"""

from collections.abc import Callable
from math import inf

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import COMPLETE, PolicyStats
from roseinfer.core.promise import Promise
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause, Forecast
from roseinfer.sched.cost.speed import MIN_STALL_RATIO
from roseinfer.sched.drafting.yields import KNOWN_STEPS_COUNT
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.common.bursts import BurstBudget
from roseinfer.sched.policies.common.rotation import BurstRotation
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.policies.slack import deadlines, terms
from roseinfer.sched.policies.slack.admission import StepAdmission
from roseinfer.sched.policies.slack.attainable import explain
from roseinfer.sched.policies.slack.demand import Demand
from roseinfer.sched.policies.slack.overload import Offer
from roseinfer.sched.policies.slack.promise import Promises
from roseinfer.sched.policies.slack.requests import SlackTrack
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policies.slack.step import SlackStep
from roseinfer.sched.policies.slack.terms import Margins, SlackOptions, Tuning
from roseinfer.sched.policy import Admitted, Decision, Ended, Event, Queued, StepDone, View
from roseinfer.sched.registry import register


@register("slack", options=SlackOptions, sheds=True, priorities=True)
class SlackPolicy:
    """Slack policy. Fifo plans while no request has objectives."""

    def __init__(
        self, config: SchedulerConfig, options: SlackOptions, known: Estimates, tuning: Tuning | None = None
    ) -> None:
        self.state = SlackState(config, options, known, tuning or Tuning())
        self._promises = Promises(self.state)
        rows = BurstRotation(options, known.cost, options.slack_decode_share)
        self._fifo = FifoPolicy(config, options, rotation=rows)
        self._bursts = BurstBudget.of(config, options, known.cost)
        self._refreshed_s = -inf
        self._done, self._done_s = -1, 0.0
        self._planned, self._seconds = -1, 0.0
        self._limit_s = inf
        self._ends_s = 0.0  # expected end of the newest planned step
        self._predicted_s = 0.0  # duration of the newest completed step; 0: not predicted

    # --- events -------------------------------------------------------------------------------------------------
    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._step_done(event)
            return
        track = self.state.ledger.observe(event)
        assert track is not None, "the ledger knows every live request"
        if isinstance(event, Queued):
            self._queued(track)
        elif isinstance(event, Admitted):
            self._admitted(track, event.now_s)
        else:
            self._fifo.observe(event)
            self._ended(track, event)

    def _step_done(self, event: StepDone) -> None:
        state, duration_s = self.state, event.duration_s
        self._done, self._done_s = event.plan.step, event.now_s
        drafts = event.plan.num_drafts
        only_decodes = event.plan.num_tokens == len(event.plan.rows) + drafts
        seen = min(state.cost.steps, state.cost.draft_steps) if drafts else state.cost.steps
        known = seen >= KNOWN_STEPS_COUNT or not state.yields.enabled
        if not state.promised and only_decodes and event.plan.step % 4 and known:
            self._predicted_s = 0.0
            return  # every fourth step is enough to keep the model up to date
        work = state.cost.params.work(event.plan.rows, event.plan.ahead, event.plan.states)
        state.cost.observe(work, duration_s)
        state.update_params()
        self._predicted_s = state.cost.predicted_s
        if duration_s > MIN_STALL_RATIO * self._predicted_s:
            state.stalled_s = event.now_s
        if work.decode_rows and duration_s:
            state.recent_step_s += 0.02 * (duration_s - state.recent_step_s)

    def _queued(self, track: SlackTrack) -> None:
        state, request = self.state, track.request
        if request.preemptions:
            self._leave(track)
            track.waits_for = None
            state.set_cause(track, Cause.BLOCKS)
            if request.num_outputs > track.length:  # it has exceeded its expected length
                track.length = request.num_outputs + state.left(track)
        else:
            state.promised += request.slo is not None
            track.length = state.lengths.total(request)
            deadlines.bound_whole(state, track)
            if state.cost.steps >= deadlines.MIN_TRUSTED_STEPS:
                track.least_tokens = state.yields.counted_tokens(request, track.tpot_s, state.cost.params)
            track.tokens_per_step = max(track.least_tokens, state.plan.tokens)
            if request.num_outputs:  # it comes from another engine
                track.length = max(track.length, request.num_outputs + state.left(track))
                if track.tpot_s < inf:
                    state.set_pace(track, request.first_token_s, request.prompt_len)
        track.latest_s = track.due_s - state.prefill_s(len(track.tokens))
        key = self._appraise(track)
        state.backlog.add(track, key, not track.is_promised or request.has_run or state.is_affordable(track))

    def _appraise(self, track: SlackTrack) -> float:
        """Set the work of a waiting request and its price, and return its key in the order."""
        state, request, p = self.state, track.request, self.state.params
        pace_s = min(track.step_pace_s, state.batch.smallest_s)
        constant_s, expert_s = state.cost_tangent(pace_s)
        prefill_s = p.prefill_s(0, len(track.tokens), state.beside)
        # Without a pace nothing is promised after the first token.
        tokens = track.length if track.tpot_s < inf else 0.0
        decode_s = state.decode_s(len(track.tokens), tokens) + tokens * expert_s
        track.weight = state.token_s(len(track.tokens), track.length) / track.step_pace_s
        if request.has_run and track.anchor_s < inf and track.is_promised:  # its next token is due, not its first
            track.due_s, track.margin_s = track.next_due_s, 0.0
            state.preempted[request.request_id] = track
        track.excess = state.tenants.excess(request.tenant, request.arrival_s)
        track.work_s = prefill_s + decode_s
        track.price_s = state.price.price_s(track.work_s, state.options.slack_fairness)
        track.price_s *= terms.price_factor(request, track.excess)
        if track.is_promised and not request.has_run:
            found = Offer(
                request.arrival_s, track.work_s, track.price_s, track.step_pace_s, track.can_wait, tokens, expert_s
            )
            state.price.offer(found)
        if request.has_run and track.is_promised and track.due_s < inf:
            return track.due_s - prefill_s
        # Decoding also causes the constant cost of steps, so a second of decoding costs more than one of prefill.
        scarce = 1 / max(0.2, 1 - constant_s / pace_s)
        key = request.arrival_s + min(track.ttft_s, terms.AGEING_S) + terms.favour_s(request, track.excess)
        if track.is_promised:
            key += state.tuning.cost_weight * (1 - state.options.slack_fairness) * (prefill_s + scarce * decode_s)
        return key

    def _admitted(self, track: SlackTrack, now_s: float) -> None:
        """Record that a request started. Its first row is planned, and `to_fill_s` is the rest of its prompt."""
        state, request, p, beside = self.state, track.request, self.state.params, self.state.beside
        state.backlog.remove(track)
        state.preempted.pop(request.request_id, None)
        state.growth += track.length
        fill_s = state.to_fill_s(track, beside)
        state.demand = state.demand_with(state.demand, track, fill_s, now_s)
        unpriced_s = state.decode_s(len(track.tokens), track.length) if track.tpot_s == inf else 0.0
        # A tenant beyond its share is charged more than its work: it stays behind others for longer.
        state.tenants.charge(request.tenant, track.work_s * (1 + track.excess) + unpriced_s, now_s)
        left = len(track.tokens) - request.computed
        state.arrive(fill_s + p.experts_s(left, beside), now_s)
        if request.slo is None:
            whole_s = p.prefill_s(request.computed, left, beside)
            state.rest_again_s = now_s + max(terms.MAX_IDLE_S, whole_s / terms.REST_SHARE)

    def _ended(self, track: SlackTrack, event: Ended) -> None:
        state, request = self.state, track.request
        state.promised -= request.slo is not None
        self._leave(track)
        if event.reason not in COMPLETE:
            return
        expected = state.lengths.total(request)
        state.length_error += 0.05 * (abs(event.num_outputs - expected) - state.length_error)
        state.lengths.finished(request, event.num_outputs)
        # Requests that met a stall, or come from another engine, must not change the margins.
        steady = request.first_token_s > state.stalled_s and not request.resumed
        if track.tpot_s < inf and track.end_s == inf and event.num_outputs > 1 and steady:
            seen_s = (event.now_s - request.first_token_s) / (event.num_outputs - 1)
            state.margins.observe(seen_s, track.tpot_s, request.first_token_s, event.now_s)

    def _leave(self, track: SlackTrack) -> None:
        """Remove a request that decodes no longer."""
        state, name = self.state, track.request.request_id
        state.unpromised.pop(name, None)
        state.backlog.remove(track)
        state.first_token_in_flight.pop(name, None)
        state.preempted.pop(name, None)
        if track in state.batch:
            state.batch.remove(track)

    # --- steps --------------------------------------------------------------------------------------------------
    def begin(self, view: View) -> Decision:
        if self._bursts is not None:
            view = self._bursts.widen(view, self.state.promised > 0)
        if not self.state.promised:
            return self._fifo.begin(view)
        now_s = view.now_s
        if self._planned > self._done:  # the new step begins when the step in flight ends
            now_s = max(now_s, self._done_s + self._seconds)
        deadlines.begin_to_decode(self.state, now_s)
        deadlines.pace_outlived(self.state, now_s)
        self.state.plan_drafts(now_s)
        deadlines.measure(self.state, now_s)
        if self.state.ledger.waiting:
            self._refresh(now_s)
        admission = StepAdmission(self.state, view, now_s)
        admission.run()
        explain(admission)
        step = SlackStep(self.state, view, now_s)
        decision = step.decide(admission)
        self._planned, self._seconds, self._limit_s = view.step, step.seconds, step.limit_s
        self._ends_s = now_s + step.seconds
        return decision

    def _refresh(self, now_s: float) -> None:
        """Recompute prices and the demand of running requests at intervals; starts in between are added."""
        state, tracks = self.state, list(self.state.batch)
        filling, beside = state.ledger.filling.values(), state.beside
        smallest_s = state.smallest_s
        if state.price.update(now_s, state.usable_share(smallest_s), state.cost_tangent):
            state.backlog.sort_by_price(state.is_affordable)
        if now_s - self._refreshed_s < terms.REFRESH_S:
            return
        self._refreshed_s = now_s
        if state.stalled_s > -inf:
            stalls = state.cost.stalls
            state.stall_s = stalls.typical_s if stalls.share > 0.005 else 0.0
            state.stalled = stalls.share
        left = [state.left(track) for track in tracks]
        state.growth = sum(left) + sum([track.length for track in filling])
        for track, more in zip(tracks, left, strict=True):
            track.weight = state.token_s(len(track.tokens), more) / (track.pace_s * track.tokens_per_step)
        state.can_wait_weight = sum([track.weight for track in tracks if track.can_wait])
        requests = [(track.slack_s, track.weight, track.step_pace_s) for track in tracks]
        experts = state.cost.params.experts is not None
        state.demand = Demand.of(requests, min(smallest_s, 1.0), state.arriving(now_s), experts)
        for track in filling:
            state.demand = state.demand_with(state.demand, track, state.to_fill_s(track, beside), now_s)
        for track in tracks:
            state.set_pace(track, track.paced_s, track.paced_tokens)

    # --- what others ask ----------------------------------------------------------------------------------------
    def forecast(self, request: Request) -> Forecast:
        track = self.state.ledger.waiting.get(request.request_id)
        return (track and track.forecast) or Forecast()

    def promise(self, counts: Promise, block_size: int, uncached: Callable[[Request], int]) -> Promise:
        return self._promises.make(counts, block_size, uncached, self._ends_s)

    def stats(self) -> PolicyStats:
        """Return the figures of `PolicyStats`. Utilisation is the long-run need, without slack saved so far."""
        state = self.state
        cost, batch = state.cost, state.batch
        margin = state.margins.of(batch.smallest_s) if len(batch) else Margins.START
        if not state.promised:
            return PolicyStats(0.0, cost.rho, margin, None, 0.0, 0, self._predicted_s)
        p, busy = state.params, state.decoding_share
        busy += (p.step_s + p.experts_s(batch.rows)) / batch.smallest_s
        busy += state.arriving(self._done_s)
        rows, budget_s = (batch.rows, self._limit_s) if len(batch) else (0.0, None)
        demoted = sum([track.tpot_s < inf for track in state.unpromised.values()])
        return PolicyStats(busy / (1 - margin), cost.rho, margin, budget_s, rows, demoted, self._predicted_s)
