"""Slack: each step lasts as long as the most urgent running request can afford, and only what fits is admitted.

A token's due time counts from the request's real first token at its TPOT objective, less a learnt margin, so tokens
ahead of schedule are slack that later steps may spend. From it follow, in each step:

1. demotion: who can no longer keep its objective takes only what is left over;
2. shedding: who can no longer have its first token in time is turned away, unless it has begun;
3. admission, by due time of the first token and cost: while the demand over every horizon fits the machine (`demand`)
   and, if more is asked of the machine than it can do, while the request is cheap enough (`price`);
4. the step's length: the smallest slack. What it leaves beside the decoding rows goes to prompts, and if that is not
   enough, requests that are well ahead sit out this step.

Costs come from a model that is fitted all the time, lengths from an estimator. Requests without objectives never count
in 3 and take what is left over, but age, so that none starves. Without any objectives the plans are those of fifo.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from roseinfer.core.config import SchedulerConfig
from roseinfer.core.events import Admitted, Ended, Event, Queued, StepDone
from roseinfer.core.outputs import COMPLETE, PolicyStats
from roseinfer.sched.cost import work_of
from roseinfer.sched.estimates import CostOptions, Estimates, LengthOptions
from roseinfer.sched.ledger import Ledger, Track
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.policies.slack.backlog import Backlog
from roseinfer.sched.policies.slack.batch import Batch
from roseinfer.sched.policies.slack.demand import Demand
from roseinfer.sched.policies.slack.margin import Margin
from roseinfer.sched.policies.slack.price import PriceLimit
from roseinfer.sched.policies.slack.step import SlackStep
from roseinfer.sched.policies.slack.tenants import TenantShares
from roseinfer.sched.policies.slack.tuning import Tuning
from roseinfer.sched.policy import Decision, View, rejectable
from roseinfer.sched.prefill import PrefillOptions
from roseinfer.sched.registry import register

SURE_STEPS = 50  # after which the cost model is trusted to call an objective unattainable


@dataclass(frozen=True, kw_only=True)
class SlackOptions(PrefillOptions, CostOptions, LengthOptions):
    """`decode_first` counts while nobody has objectives, when fifo plans; the others always."""

    def __post_init__(self) -> None:
        PrefillOptions.__post_init__(self)
        LengthOptions.__post_init__(self)


@register("slack", options=SlackOptions, sheds=True, priorities=True)
class SlackPolicy:
    """What lasts from step to step; `SlackStep` is one step."""

    def __init__(
        self, config: SchedulerConfig, options: SlackOptions, known: Estimates, tuning: Tuning | None = None
    ) -> None:
        self.tuning = tuning or Tuning()
        self.cost = known.cost
        self.lengths = known.lengths
        self.ledger = Ledger()
        self.margin = Margin()
        self.batch = Batch(self.margin.value)
        self.leftover: dict[str, Track] = {}  # decode, but are owed nothing: best effort, or demoted
        self.demand = Demand.of([], [], 0.05)
        self.backlog = Backlog()
        self.price = PriceLimit(self.tuning.price_window_s, self.tuning.price_fill)
        self.tenants = TenantShares()
        self.growth = 0.0  # tokens that the running requests are expected to add
        self.seats = config.max_running
        self.prompt_rate = 0.0  # prompt tokens a second, over the last one
        self.options = options
        self._fifo = FifoPolicy(config, options)
        self.rest_started_s = -inf  # when a request without objectives last started
        self._promised = 0  # live requests with objectives
        self._demoted = 0  # of `leftover`, those with a TPOT objective
        self._unseen: dict[str, Track] = {}  # whose first token is still on its way
        self._refreshed_s = -inf
        self._done, self._done_s = -1, 0.0
        self._planned, self._seconds = -1, 0.0
        self._limit_s = inf
        self._predicted_s = 0.0  # of the newest completed step; 0: nobody asked the model

    # --- what happens -------------------------------------------------------------------------------------------
    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._step_done(event)
            return
        self._fifo.observe(event)
        track = self.ledger.observe(event)
        assert track is not None, "the ledger knows every live request"
        if isinstance(event, Queued):
            self._queued(track)
        elif isinstance(event, Admitted):
            self.demand = self.demand_with(self.demand, track, track.request.remaining, event.now_s)
            self.growth += track.length
            self.tenants.charge(track.request.tenant, track.work_s, event.now_s)
            if track.request.slo is None:
                self.rest_started_s = event.now_s
        else:
            self._ended(track, event)

    def _step_done(self, event: StepDone) -> None:
        self._done, self._done_s = event.plan.step, event.now_s
        if not self._promised and event.plan.step % 4:
            self._predicted_s = 0.0
            return  # nobody needs to know, but the model should stay true
        work = work_of(event.plan.rows)
        self.cost.observe(work, event.duration_s)
        self._predicted_s = self.cost.predicted_s
        lasted_s = max(event.duration_s, 1e-6)
        self.prompt_rate += min(1.0, lasted_s) * (work.prompt_tokens / lasted_s - self.prompt_rate)

    def _queued(self, track: Track) -> None:
        request, p = track.request, self.cost.params
        if request.preemptions:
            self._leave(track)
        else:
            self._promised += request.slo is not None
            track.length = self.lengths.total(request)
            track.bound_whole()
        prefill_s = p.token_s * len(track.tokens)
        decode_s = track.length * (p.row_s + p.context_s * (len(track.tokens) + track.length / 2))
        track.work_s = prefill_s + decode_s
        track.weight = (p.row_s + p.context_s * (len(track.tokens) + track.length / 2)) / track.tpot_s
        track.key = request.arrival_s + min(track.ttft_s, self.tuning.ageing_s)
        excess = self.tenants.excess(request.tenant)
        track.key += self.tuning.priority_s * request.priority + self.tuning.fairness_s * excess
        if track.tpot_s < inf:
            # The constant part of a step is paid anyway, so a second of decoding costs more than one of prefill.
            scarce = 1 / max(0.2, 1 - p.step_s / min(track.tpot_s, self.batch.smallest_s))
            track.key += self.tuning.cost_weight * (prefill_s + scarce * decode_s)
            if not request.preemptions:
                self.price.offer(request.arrival_s, track.work_s, track.work_s * (1 + excess))
            track.work_s *= 1 + excess
        self.backlog.add(track, self.price.limit_s)
        if track.ttft_s < inf:
            self.backlog.watch(track, track.due_s - prefill_s - p.step_s)

    def _ended(self, track: Track, event: Ended) -> None:
        self._promised -= track.request.slo is not None
        self._leave(track)
        if event.reason not in COMPLETE:
            return
        self.lengths.finished(track.request, event.num_outputs)
        if track.tpot_s < inf and event.num_outputs > 1:
            spent_s = event.now_s - track.request.first_token_s
            self.margin.observe(spent_s / (event.num_outputs - 1), track.tpot_s)
            if abs(self.margin.value - self.batch.margin) > 5e-4:
                self.batch.set_margin(self.margin.value)

    def _leave(self, track: Track) -> None:
        """It decodes no longer."""
        name = track.request.request_id
        if self.leftover.pop(name, None) is not None:
            self._demoted -= track.tpot_s < inf
        self._unseen.pop(name, None)
        if track in self.batch:
            self.batch.remove(track)

    # --- a step -------------------------------------------------------------------------------------------------
    def begin(self, view: View) -> Decision:
        if not self._promised:
            self.backlog.tidy()
            return self._fifo.begin(view)
        now_s, in_flight = view.now_s, self._planned > self._done
        if in_flight:  # it begins when the step in flight ends
            now_s = max(now_s, self._done_s + self._seconds)
        self._promote(now_s)
        step = SlackStep(self, view, now_s, in_flight)
        decision = step.decide()
        self._planned, self._seconds, self._limit_s = view.step, step.seconds, step.limit_s
        return decision

    def _promote(self, now_s: float) -> None:
        for name, track in list(self._unseen.items()):
            if track.request.first_token_s:
                del self._unseen[name]
                if track in self.batch:
                    self.batch.anchor(track, track.request.first_token_s)
        for track in self.ledger.promote():
            name, first_s = track.request.request_id, track.request.first_token_s
            if track.tpot_s == inf or track.doomed or self.unattainable(track):
                self._set_aside(track, now_s)
                continue
            self.batch.add(track, first_s or now_s)
            if not first_s:
                self._unseen[name] = track

    def demote(self, track: Track, now_s: float) -> None:
        self.batch.remove(track)
        track.doomed = True
        self._set_aside(track, now_s)

    def _set_aside(self, track: Track, now_s: float) -> None:
        """It takes what is left over from now on."""
        track.idle_s = now_s
        self.leftover[track.request.request_id] = track
        self._demoted += track.tpot_s < inf

    def refresh_demand(self, now_s: float, slacks: Sequence[float], context: Sequence[int], smallest_s: float) -> None:
        """From the requests that run, now and then; in between, those that start are added."""
        if now_s - self._refreshed_s < self.tuning.refresh_s:
            return
        self._refreshed_s = now_s
        row_s, context_s, tracks = self.cost.params.row_s, self.cost.params.context_s, self.batch.tracks
        left = self.left(context)
        self.growth = sum(left) + sum([track.length for track in self.ledger.filling.values()])
        weights = [
            (row_s + context_s * (n + more / 2)) / track.pace_s
            for track, n, more in zip(tracks, context, left, strict=True)
        ]
        arriving = min(self.tuning.prefill_share, self.cost.params.token_s * self.prompt_rate)
        self.demand = Demand.of(slacks, weights, min(smallest_s, 1.0), arriving)
        for track in self.ledger.filling.values():
            self.demand = self.demand_with(self.demand, track, track.request.remaining, now_s)

    def left(self, context: Sequence[int]) -> list[float]:
        """Tokens that each request of the batch is expected to add."""
        left, pairs = self.lengths.left, zip(self.batch.tracks, context, strict=True)
        return [left(track.request, max(1, n - track.request.prompt_len)) for track, n in pairs]

    def demand_with(self, demand: Demand, track: Track, prompt: int, now_s: float) -> Demand:
        """A request that takes what is left adds nothing."""
        if track.tpot_s == inf:
            return demand
        due_s = min(track.due_s, now_s + self.tuning.ageing_s) - now_s
        return demand.with_one(track.weight, self.cost.params.token_s * prompt, due_s)

    def prefill_s(self, tokens: int) -> float:
        """On a machine that does nothing else."""
        return self.cost.params.step_s + self.cost.params.token_s * tokens

    def unattainable(self, track: Track) -> bool:
        """Whether its TPOT objective is shorter than a step that holds nothing else."""
        p = self.cost.params
        alone_s = p.step_s + p.row_s + p.context_s * len(track.tokens)
        return self.cost.steps >= SURE_STEPS and track.tpot_s < alone_s

    def hopeless(self, view: View, now_s: float) -> list[Track]:
        """Those waiting that even an idle machine could not serve in time any more."""
        found = []
        for track in self.backlog.overdue(now_s):
            if not rejectable(track.request):
                continue
            latest_s = track.due_s - self.prefill_s(view.uncached(track.request))
            if latest_s < now_s and view.can_start(track.request):
                found.append(track)
            elif track.due_s >= now_s:
                self.backlog.watch(track, max(latest_s, now_s))
        return found

    # --- looking in ---------------------------------------------------------------------------------------------
    def stats(self) -> PolicyStats:
        """Utilisation counts no slack that requests have saved up: it is what they need in the long run."""
        cost, batch, margin = self.cost, self.batch, self.margin.value
        if not self._promised:
            return PolicyStats(0.0, cost.rho, margin, None, 0.0, 0, self._predicted_s)
        p = cost.params
        busy = p.row_s * batch.tokens_per_s + p.context_s * batch.context_per_s + p.step_s / batch.smallest_s
        busy += min(self.tuning.prefill_share, p.token_s * self.prompt_rate)
        utilisation, rows, budget_s = busy / (1 - margin), 0.0, None
        if len(batch):
            rows, budget_s = batch.smallest_s * batch.tokens_per_s, self._limit_s
        return PolicyStats(utilisation, cost.rho, margin, budget_s, rows, self._demoted, self._predicted_s)
