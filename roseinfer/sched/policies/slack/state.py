"""State of the slack policy between steps."""

from math import inf

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.common.draft_plan import NO_DRAFTS, best_plan
from roseinfer.sched.policies.common.ledger import RequestStages, TpotBatch, Track
from roseinfer.sched.policies.common.tenants import TenantShares
from roseinfer.sched.policies.slack.demand import Demand
from roseinfer.sched.policies.slack.overload import PRICED, PriceLimit
from roseinfer.sched.policies.slack.requests import Backlog, SlackTrack
from roseinfer.sched.policies.slack.terms import AGEING_S, REFRESH_S, Margins, SlackOptions, Tuning
from roseinfer.sched.recent_share import RecentShare

MAX_ARRIVING_SHARE = 0.35  # most of the time that the forecast of prompts may take
ARRIVALS_S = 10.0  # time constant of that forecast
MAX_COUNTED_PROMPT_S = 0.2  # a longer prompt counts in it as this
DEFAULT_LENGTH_ERROR_TOKENS = 256.0  # error of an expected length before errors are known
# Causes of a request that lacks nothing but its price, as far as is known.
_UNPRICED_CAUSES = (None, Cause.UTILISATION, *PRICED)


class SlackState:
    """State between steps. `batch`: decoding requests with token deadlines. `unpromised`: other decoding requests, by
    id: best effort or demoted. `plan`: drafts that each row gets. `params`: costs of steps with these drafts.
    `preempted`: waiting requests with token deadlines. `promised`: number of live requests with objectives. `growth`:
    tokens that running requests are expected to add. `recent_step_s`: smoothed time between tokens. `can_wait_weight`:
    share of the machine for running requests that could have waited. `rest_again_s`: when the next request without
    objectives may start before others. `overdue_again_s`: when to look for requests that wait too long.
    `cause_changes`: requests whose cause has changed since the last decision.
    """

    def __init__(self, config: SchedulerConfig, options: SlackOptions, known: Estimates, tuning: Tuning) -> None:
        self.options = options
        self.tuning = tuning
        self.seats = config.max_running
        self.cost = known.cost
        self.lengths = known.lengths
        self.yields = known.yields
        self.ledger = RequestStages(SlackTrack)
        self.margins = Margins()
        self.batch: TpotBatch[SlackTrack] = TpotBatch(known.cost.params.reads)
        self.unpromised: dict[str, SlackTrack] = {}
        self.plan = NO_DRAFTS
        self.params = known.cost.params
        self._plan_again_s = -inf
        self.preempted: dict[str, SlackTrack] = {}
        self.first_token_in_flight: dict[str, SlackTrack] = {}
        self.backlog = Backlog()
        self.demand = Demand.of([], 0.05)
        self.price = PriceLimit()
        self.tenants = TenantShares()
        self.cause_changes: list[tuple[Request, Cause]] = []
        self.promised = 0
        self.growth = self.recent_step_s = 0.0
        self.can_wait_weight = 0.0
        self.length_error = DEFAULT_LENGTH_ERROR_TOKENS
        self.rest_again_s = self.overdue_again_s = self.stalled_s = -inf
        self.stall_s = self.stalled = 0.0  # length of a stall, and share of the time
        self._started = RecentShare(ARRIVALS_S)  # of prompts

    # --- drafts -------------------------------------------------------------------------------------------------
    def update_params(self) -> None:
        """Price the planned drafts again, because the plan or the cost model has changed."""
        params = self.cost.params
        self.params = self.plan.priced(params, len(self.batch), self.yields) if self.plan.drafts else params

    def plan_drafts(self, now_s: float) -> None:
        """Choose the drafts of each row at intervals."""
        if not self.yields.gains or now_s < self._plan_again_s or not len(self.batch):
            return
        self._plan_again_s = now_s + REFRESH_S
        self.plan = best_plan(self.yields, self.cost.params, list(self.batch), self.plan)
        self.update_params()
        for stage in (self.ledger.waiting, self.ledger.filling, self.ledger.decoding):
            for track in stage.values():
                track.tokens_per_step = max(track.least_tokens, self.plan.tokens)
        self.batch.sum_again()

    def set_pace(self, track: Track, from_s: float, from_tokens: int) -> None:
        """Set token deadlines from `from_s` on, when it had `from_tokens` tokens, with the present margin."""
        track.set_pace(self.margins.of(track.tpot_s), from_s, from_tokens)

    # --- costs --------------------------------------------------------------------------------------------------
    @property
    def beside(self) -> float:
        """Mean tokens of a step (decoding rows and started prompts), which set the cost of experts for more tokens. It
        is 0 for a model without experts.
        """
        if self.params.experts is None:
            return 0.0
        filling = sum([track.request.remaining for track in self.ledger.filling.values()])
        return filling + len(self.unpromised) + self.batch.rows

    def cost_tangent(self, pace_s: float) -> tuple[float, float]:
        """Return `CostParams.cost_tangent` at the mean context of the batch."""
        batch = self.batch
        return self.params.cost_tangent(pace_s, batch.context_per_s / batch.tokens_per_s if len(batch) else 0.0)

    def token_s(self, context: int, length: float) -> float:
        """Return the mean machine time of a row in a step, over `length` output tokens after `context` others."""
        return self.params.row_s + self.params.context_s * self.params.reads.of(context + length / 2)

    def decode_s(self, context: int, length: float) -> float:
        """Return the machine time of `length` output tokens after `context` others."""
        return length * self.token_s(context, length) / self.plan.tokens

    @property
    def decoding_share(self) -> float:
        """Share of the time that the rows of decoding requests with token deadlines need."""
        return self.params.row_s * self.batch.tokens_per_s + self.params.context_s * self.batch.context_per_s

    def left(self, track: Track, share: float | None = None) -> float:
        """Return the tokens that a decoding request is expected to add; `share`: as in `LengthEstimator`."""
        return self.lengths.left(track.request, max(1, track.request.num_outputs), share)

    @property
    def smallest_s(self) -> float:
        """Tightest promised TPOT objective of the running requests, inf without one."""
        promised = [track.step_pace_s for track in self.ledger.filling.values() if track.is_promised]
        return min([self.batch.smallest_s, *promised])

    def demand_with(self, demand: Demand, track: SlackTrack, prefill_s: float, now_s: float) -> Demand:
        """Return the demand with one more request; a request without promises adds nothing."""
        if not track.is_promised:
            return demand
        due_s = min(track.due_s - now_s, AGEING_S)
        return demand.with_one(track.weight, track.step_pace_s, prefill_s, due_s)

    def prefill_s(self, tokens: int) -> float:
        """Return the time of a prompt on an idle machine."""
        return self.params.step_s + self.params.prefill_s(0, tokens)

    def to_fill_s(self, track: Track, beside: float) -> float:
        """Return the machine time of the rest of a running request's prompt. `beside`: as in the property."""
        request, left = track.request, track.request.remaining
        return self.params.prefill_s(request.planned, left, max(0.0, beside - left))

    def alone_s(self, track: Track) -> float:
        """Return the time of a step with this request alone."""
        return self.cost.params.alone_s(len(track.tokens))

    def usable_share(self, smallest_s: float) -> float:
        """Return the share of the time left by margin and stalls, at this smallest TPOT objective (inf: none)."""
        return (1 - self.margins.of(smallest_s) if smallest_s < inf else 1.0) - self.stalled

    # --- forecast of prompts ------------------------------------------------------------------------------------
    def arriving(self, now_s: float) -> float:
        """Return the share of the time that started prompts took recently."""
        return min(MAX_ARRIVING_SHARE, self._started.at(now_s))

    def arrive(self, prefill_s: float, now_s: float) -> None:
        """Record a started prompt of `prefill_s` seconds. A long one is capped, because the next may be far off."""
        self._started.add(min(prefill_s, MAX_COUNTED_PROMPT_S), now_s)

    # --- causes -------------------------------------------------------------------------------------------------
    def set_cause(self, track: SlackTrack, cause: Cause) -> None:
        """Set what a waiting request waits for."""
        if track.waits_for is not cause:
            track.waits_for = cause
            self.cause_changes.append((track.request, cause))

    def objection(self, track: SlackTrack) -> Cause | None:
        """Return why it is not worth its cost, None if it is; TENANT if only its tenant's excess is the reason."""
        price, can_wait = self.price, track.can_wait
        found = price.objection(track.price_s, track.step_pace_s, can_wait)
        if found is Cause.PRICE and track.excess:
            own_s = track.price_s / (1 + track.excess)
            found = price.objection(own_s, track.step_pace_s, can_wait) or Cause.TENANT
        return found

    def is_affordable(self, track: SlackTrack) -> bool:
        """True if a request is worth its cost under the present limits; also updates its cause."""
        found = self.objection(track)
        if found is None:
            if track.waits_for in PRICED:  # until its cause is known
                self.set_cause(track, Cause.UTILISATION)
                track.waits_for = None
        elif track.waits_for in _UNPRICED_CAUSES:
            self.set_cause(track, found)
        return found is None
