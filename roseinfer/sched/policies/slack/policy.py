"""Slack: each step lasts as long as the most urgent running request can afford, and only what fits is admitted.

The deadline of a token counts from the request's real first token at its TPOT objective, less a learnt margin. Tokens
ahead of schedule are slack that later steps may use. Each step decides, in this order:

1. demotion: a request that can no longer meet its objective decodes only in spare time;
2. rejection: a waiting request that can no longer have its first token in time is rejected, unless it has run;
3. admission, by deadline of the first token and cost: while the demand over every horizon fits the machine (`demand`)
   and, under overload, while the request is cheap enough (`price`);
4. the step's length: the smallest slack. Prompts get what the decoding rows leave of it. If that is not enough,
   requests that are well ahead skip this step.

Costs come from a model that is fitted continuously, lengths from an estimator. Requests without objectives never count
in 3 and use spare time, but age, so that none starves. While no request has objectives, plans are those of fifo, with
`BurstRotation` and `BurstBudget` for a queue of prompts.
"""

from collections.abc import Callable
from math import inf

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import PolicyStats
from roseinfer.core.promise import Promise
from roseinfer.core.request import Request
from roseinfer.core.slo import Forecast
from roseinfer.sched.cost.params import work_of
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.common.bursts import BurstBudget
from roseinfer.sched.policies.common.rotation import BurstRotation
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.policies.slack.capacity import Margins
from roseinfer.sched.policies.slack.promise import Promises
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policies.slack.step import SlackStep
from roseinfer.sched.policies.slack.tuning import SlackOptions, Tuning
from roseinfer.sched.policy import Admitted, Decision, Event, Queued, StepDone, View
from roseinfer.sched.registry import register


@register("slack", options=SlackOptions, sheds=True, priorities=True)
class SlackPolicy:
    """Slack policy. A `SlackStep` plans each step from `state`; fifo plans while no request has objectives."""

    def __init__(
        self, config: SchedulerConfig, options: SlackOptions, known: Estimates, tuning: Tuning | None = None
    ) -> None:
        self.state = SlackState(config, options, known, tuning or Tuning())
        self._promises = Promises(self.state)
        rows = BurstRotation(options, known.cost, options.slack_decode_share)
        self._fifo = FifoPolicy(config, options, rotation=rows)
        self._fifo_planned = False
        self._bursts = BurstBudget.of(config, options, known.cost)
        self._done, self._done_s = -1, 0.0
        self._planned, self._seconds = -1, 0.0
        self._limit_s = inf
        self._ends_s = 0.0  # expected end of the newest planned step
        self._predicted_s = 0.0  # duration of the newest completed step; 0: not predicted

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._step_done(event)
            return
        if self._fifo_planned:  # else it has nothing to forget
            self._fifo.observe(event)
        track = self.state.ledger.observe(event)
        assert track is not None, "the ledger knows every live request"
        if isinstance(event, Queued):
            self.state.queued(track)
        elif isinstance(event, Admitted):
            self.state.admitted(track, event.now_s)
        else:
            self.state.ended(track, event)

    def _step_done(self, event: StepDone) -> None:
        self._done, self._done_s = event.plan.step, event.now_s
        only_decodes = event.plan.num_tokens == len(event.plan.rows)
        if not self.state.promised and only_decodes and event.plan.step % 4:
            self._predicted_s = 0.0
            return  # every fourth step is enough to keep the model up to date
        self.state.stepped(work_of(event.plan.rows), event.duration_s, event.now_s)
        self._predicted_s = self.state.cost.predicted_s

    def begin(self, view: View) -> Decision:
        if self._bursts is not None:
            view = self._bursts.widen(view, self.state.promised > 0)
        if not self.state.promised:
            self.state.backlog.tidy()
            self._fifo_planned = True
            return self._fifo.begin(view)
        now_s, in_flight = view.now_s, self._planned > self._done
        if in_flight:  # the new step begins when the step in flight ends
            now_s = max(now_s, self._done_s + self._seconds)
        self.state.promote(now_s)
        self.state.demote_outlived(now_s)
        self.state.give_up_paces(now_s)
        self.state.pace_outlived(now_s)
        step = SlackStep(self.state, view, now_s, in_flight)
        decision = step.decide()
        self._planned, self._seconds, self._limit_s = view.step, step.seconds, step.limit_s
        self._ends_s = now_s + step.seconds
        return decision

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
        p = cost.params
        busy = p.row_s * batch.tokens_per_s + p.context_s * batch.context_per_s
        busy += (p.step_s + p.experts_s(batch.rows)) / batch.smallest_s
        busy += state.arriving(self._done_s)
        utilisation, rows, budget_s = busy / (1 - margin), 0.0, None
        if len(batch):
            rows, budget_s = batch.rows, self._limit_s
        return PolicyStats(utilisation, cost.rho, margin, budget_s, rows, state.demoted, self._predicted_s)
