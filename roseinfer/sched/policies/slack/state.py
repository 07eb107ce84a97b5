"""State of the slack policy between steps. The policy updates it with events, and each step is planned from it."""

from collections.abc import Sequence
from math import exp, inf

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import COMPLETE
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.sched.cost.params import Work
from roseinfer.sched.cost.speed import MIN_STALL_RATIO
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.common.ledger import RequestStages, TpotBatch, Track
from roseinfer.sched.policies.common.tenants import TenantShares
from roseinfer.sched.policies.slack.backlog import Backlog
from roseinfer.sched.policies.slack.capacity import PRICED, Demand, Margins, Offer, PriceLimit
from roseinfer.sched.policies.slack.tuning import SlackOptions, Tuning
from roseinfer.sched.policy import Ended, View, rejectable

MIN_PACE_STEPS = 1.1  # lower bound on a derived TPOT, in steps of the request alone
# The same for paces derived from a deadline: a faster one would delay all others because of one guessed length.
MIN_WHOLE_PACE_STEPS = 2.0
DEFAULT_LENGTH_ERROR_TOKENS = 256.0  # error of an expected length before errors are known
MIN_LENGTH_ERROR_TOKENS = 64.0  # many outputs are this long, whatever their expected length
MAX_FAST_SHARE = 0.1  # of the running requests, whose pace may be given up
MIN_PACE_GAIN = 1.5  # requests served at a slower pace, relative to now, for which fast paces are given up
MIN_HURRY_SHARE = 0.75  # of its initial pace, to which a late request is hurried at most
# Causes of a request that lacks nothing but its price, as far as is known.
_UNPRICED_CAUSES = (None, Cause.UTILISATION, *PRICED)
MIN_TRUSTED_STEPS = 50  # observed steps after which the cost model may call an objective unattainable


class SlackState:
    """State between steps. `batch`: decoding requests with token deadlines. `unpromised`: other decoding requests, by
    id: best effort or demoted. `promised`: number of live requests with objectives. `demoted`: number of `unpromised`
    with a TPOT objective. `growth`: tokens that running requests are expected to add. `rest_again_s`: when the next
    request without objectives may start before others. `recent_step_s`: smoothed time between tokens. `cause_changes`:
    requests whose cause has changed since the last decision.
    """

    def __init__(self, config: SchedulerConfig, options: SlackOptions, known: Estimates, tuning: Tuning) -> None:
        self.options = options
        self.tuning = tuning
        self.seats = config.max_running
        self.cost = known.cost
        self.lengths = known.lengths
        self.ledger = RequestStages()
        self.margins = Margins()
        self.batch = TpotBatch(self.margins.of)
        self.unpromised: dict[str, Track] = {}
        self.demand = Demand.of([], [], [], 0.05)
        self.backlog = Backlog()
        self.price = PriceLimit(tuning.price_window_s, tuning.price_fill)
        self.cause_changes: list[tuple[Request, Cause]] = []
        self.tenants = TenantShares()
        self.promised = self.demoted = 0
        self.can_wait_weight = 0.0
        self.growth = self.recent_step_s = 0.0
        self.length_error = DEFAULT_LENGTH_ERROR_TOKENS
        self.rest_again_s = -inf
        self.preempted: dict[str, Track] = {}
        self._first_token_in_flight: dict[str, Track] = {}  # first token still in flight
        self._refreshed_s = self._repriced_s = self._stalled_s = -inf
        self.stall_s = self.stalled = 0.0
        self._arriving = self._arrived_s = 0.0

    # --- events -------------------------------------------------------------------------------------------------
    def stepped(self, work: Work, duration_s: float, now_s: float) -> None:
        """Record a step that took `duration_s` and has just ended."""
        self.cost.observe(work, duration_s)
        if duration_s > MIN_STALL_RATIO * self.cost.predicted_s:
            self._stalled_s = now_s
        if work.decode_rows and duration_s:
            self.recent_step_s += 0.02 * (duration_s - self.recent_step_s)

    def queued(self, track: Track) -> None:
        request, p = track.request, self.cost.params
        if request.preemptions:
            self._leave(track)
            track.waits_for = None
            self.set_cause(track, Cause.BLOCKS)
            if request.num_outputs > track.length:  # it has exceeded its expected length
                track.length = request.num_outputs + self.lengths.left(request, request.num_outputs)
        else:
            self.promised += request.slo is not None
            track.length = self.lengths.total(request)
            self._bound_whole(track)
            if request.num_outputs:
                self._take_over(track)
        prefill_s = p.prefill_s(0, len(track.tokens), self.beside)
        pace_s = min(track.tpot_s, self.batch.smallest_s)
        constant_s, expert_s = self.cost_tangent(pace_s)
        decode_s = self._decode_s(len(track.tokens), track.length) + track.length * expert_s
        track.work_s = prefill_s
        if track.tpot_s < inf:  # without it nothing is promised after the first token
            track.work_s += decode_s
        track.weight = (p.row_s + p.context_s * (len(track.tokens) + track.length / 2)) / track.tpot_s
        if request.has_run and track.anchor_s < inf and track.is_promised:  # its next token is due, not its first
            track.due_s = track.anchor_s + track.pace_s * len(track.tokens)
            self.preempted[request.request_id] = track
        track.key = request.arrival_s + min(track.ttft_s, self.tuning.ageing_s, 0.1 * (track.end_s - request.arrival_s))
        track.excess = excess = self.tenants.excess(request.tenant, request.arrival_s)
        track.key += self.tuning.priority_s * self._level(request) + self.tuning.fairness_s * excess
        if track.tpot_s < inf:
            # Decoding also causes the constant cost of steps, so a second of decoding costs more than one of prefill.
            scarce = 1 / max(0.2, 1 - constant_s / pace_s)
            weight = self.tuning.cost_weight * (1 - self.options.slack_fairness)
            track.key += weight * (prefill_s + scarce * decode_s)
        track.price_s = self._price_s(request, track.work_s, excess)
        if track.is_promised and not request.has_run:
            tokens = track.length if track.tpot_s < inf else 0.0
            self.price.offer(
                Offer(request.arrival_s, track.work_s, track.price_s, track.tpot_s, track.can_wait, tokens, expert_s)
            )
        track.work_s *= 1 + excess
        if request.has_run and track.is_promised and track.due_s < inf:
            track.key = track.due_s - prefill_s
        self.backlog.add(track, not track.is_promised or request.has_run or self.is_affordable(track))
        if track.ttft_s < inf:
            self.backlog.watch(track, track.due_s - p.prefill_s(0, len(track.tokens)) - p.step_s)

    def admitted(self, track: Track, now_s: float) -> None:
        """Record that a request started. Its first row is planned, and `to_fill_s` is the rest of its prompt."""
        self.preempted.pop(track.request.request_id, None)
        if track.is_promised and not track.request.has_run:
            self.price.decided(refused=False)
        fill_s = self.to_fill_s(track)
        self.demand = self.demand_with(self.demand, track, fill_s, now_s)
        self.growth += track.length
        unpriced_s = self._decode_s(len(track.tokens), track.length) if track.tpot_s == inf else 0.0
        self.tenants.charge(track.request.tenant, track.work_s + unpriced_s, now_s)
        left = len(track.tokens) - track.request.computed
        self._arrive(fill_s + self.cost.params.experts_s(left, self.beside), now_s)
        if track.request.slo is None:
            whole_s = self.cost.params.prefill_s(track.request.computed, left, self.beside)
            self.rest_again_s = now_s + max(self.tuning.idle_limit_s, whole_s / self.tuning.rest_share)

    def ended(self, track: Track, event: Ended) -> None:
        request = track.request
        self.promised -= request.slo is not None
        self._leave(track)
        if request.hinted and event.num_outputs > (request.predicted_len or 0) and self._doubtful(track):
            self._reprice(track, event.num_outputs, event.now_s)
        if event.reason not in COMPLETE:
            return
        expected = self.lengths.total(request)
        self.length_error += 0.05 * (abs(event.num_outputs - expected) - self.length_error)
        self.lengths.finished(request, event.num_outputs)
        # Requests that met a stall, or come from another engine, must not change the margins.
        steady = request.first_token_s > self._stalled_s and not request.resumed
        if track.tpot_s < inf and track.end_s == inf and event.num_outputs > 1 and steady:
            spent_s = event.now_s - request.first_token_s
            self.margins.observe(spent_s / (event.num_outputs - 1), track.tpot_s)

    def _take_over(self, track: Track) -> None:
        """Continue the deadlines and the expected length of a request that comes from another engine."""
        request = track.request
        track.length = max(track.length, request.num_outputs + self.lengths.left(request, request.num_outputs))
        if track.tpot_s < inf:
            track.set_pace(self.margins.of(track.tpot_s), request.first_token_s, request.prompt_len)

    def _bound_whole(self, track: Track) -> None:
        """Derive TTFT and TPOT objectives from a deadline for the last token, at the present step time. A tenth of the
        time is for the prompt. The pace is that of the expected length: one for its error would keep out requests that
        fit. After the first token, `_pace_whole` sets the pace from the time left.
        """
        if track.end_s == inf:
            return
        arrival_s = track.request.arrival_s
        whole_s = track.end_s - arrival_s
        latest_s = self._latest_s(track, max(MIN_PACE_STEPS * self.alone_s(track), self.recent_step_s))
        if latest_s < track.ttft_s:
            track.ttft_s, track.due_s = latest_s, arrival_s + latest_s
        pace_s = max(0.9 * whole_s / max(1.0, track.length), MIN_WHOLE_PACE_STEPS * self.alone_s(track))
        track.tpot_s = min(track.tpot_s, pace_s)

    def _latest_s(self, track: Track, step_s: float) -> float:
        """Return the most seconds from arrival to first token with which the longest likely output is in time."""
        whole_s = track.end_s - track.request.arrival_s
        return max(whole_s - step_s * (track.length + self.wrong_by(track)), 0.1 * whole_s)

    def wrong_by(self, track: Track) -> float:
        """Return the likely error of its expected length: that of others, at most half of it or a fixed minimum."""
        return min(self.length_error, max(0.5 * track.length, MIN_LENGTH_ERROR_TOKENS))

    def _pace_whole(self, track: Track, now_s: float) -> None:
        """Set its pace so that the remaining tokens are spread over the time left until its deadline."""
        slo = track.request.slo
        assert slo is not None
        left = self.lengths.left(track.request, max(1, track.outputs))
        track.length = track.outputs + left
        own_s = slo.tpot_s or inf
        worth_s = max(self.price.pace_s, self.price.fastest_s)
        least_s = max(MIN_WHOLE_PACE_STEPS * self.alone_s(track), worth_s, track.floor_s)
        pace_s = max((track.end_s - now_s) / (left + 0.25 * track.outputs + self.wrong_by(track)), least_s)
        if not track.floor_s:
            track.floor_s = MIN_HURRY_SHARE * pace_s
        track.tpot_s = min(own_s, pace_s)

    def _leave(self, track: Track) -> None:
        """Remove a request that decodes no longer."""
        name = track.request.request_id
        if self.unpromised.pop(name, None) is not None:
            self.demoted -= track.tpot_s < inf
        self._first_token_in_flight.pop(name, None)
        self.preempted.pop(name, None)
        if track in self.batch:
            self.batch.remove(track)

    # --- stages -------------------------------------------------------------------------------------------------
    def promote(self, now_s: float) -> None:
        """Let requests with a fully planned prompt decode, and count deadlines from first tokens once they are seen."""
        for name, track in list(self._first_token_in_flight.items()):
            if track.request.first_token_s:
                del self._first_token_in_flight[name]
                if track in self.batch:
                    self.batch.anchor(track, track.request.first_token_s)
        for track in self.ledger.promote():
            name, first_s = track.request.request_id, track.request.first_token_s
            if track.end_s < inf:
                self._pace_whole(track, first_s or now_s)
            if track.tpot_s == inf or track.is_demoted or self.unattainable(track):
                self._set_aside(track, now_s)
                continue
            self.batch.add(track, first_s or now_s)
            if not first_s:
                self._first_token_in_flight[name] = track

    def give_up_paces(self, now_s: float) -> None:
        """Demote running requests that need a fast pace if far more requests could be served at a slower one. They
        started before the overload. Keeping the promise to these few would break it for many others.
        """
        if self.price.gain >= MIN_PACE_GAIN and self.ledger.waiting:
            fast = [track for track in self.batch.tracks if self.gives_up_pace(track)]
            if len(fast) <= MAX_FAST_SHARE * len(self.batch):
                for track in fast:
                    self.demote(track, now_s)

    def gives_up_pace(self, track: Track) -> bool:
        """True if its pace may be given up, because far more requests could be served at a slower one."""
        return self.price.gain >= MIN_PACE_GAIN and track.tpot_s < self.price.pace_s and track.end_s == inf

    def pace_outlived(self, now_s: float) -> None:
        """Set a faster pace for requests with a deadline that have exceeded their expected length."""
        pace_s = self.price.pace_s
        late = [
            t
            for t in self.batch.tracks
            if t.end_s < inf
            and (t.outputs > t.length - 1 or (t.tpot_s < pace_s and t.request.slo and not t.request.slo.tpot_s))
        ]
        for track in late:
            self.batch.remove(track)
            self._pace_whole(track, now_s)
            self.batch.add(track, now_s, len(track.tokens))

    def demote(self, track: Track, now_s: float) -> None:
        self.batch.remove(track)
        track.is_demoted = True
        self._set_aside(track, now_s)

    def demote_outlived(self, now_s: float) -> None:
        """Under overload, price requests again that exceeded their clients' predictions, and demote expensive ones. A
        request above the price limit would not have started with a true prediction, so a false one must not help it.
        """
        tuning, limit_s = self.tuning, self.price.limit_s
        if limit_s == inf or not self.ledger.waiting or now_s - self._repriced_s < tuning.refresh_s:
            return
        self._repriced_s = now_s
        for track in [track for track in self.batch.tracks if track.request.hinted and self._doubtful(track)]:
            if track.outputs > tuning.hint_factor * (track.request.predicted_len or 0) + tuning.hint_tokens:
                self._reprice(track, track.outputs + self.lengths.left(track.request, track.outputs), now_s)
                if track.price_s > limit_s:
                    self.demote(track, now_s)

    def _doubtful(self, track: Track) -> bool:
        """True if a client's prediction cannot be judged yet, because too few of its requests have ended."""
        return not self.lengths.known(track.request)

    def _reprice(self, track: Track, length: float, now_s: float) -> None:
        """Charge the tenant for the work of an output that is longer than its client predicted."""
        request = track.request
        prefill_s = self.cost.params.prefill_s(0, request.prompt_len, self.beside)
        work_s = prefill_s + self._decode_s(request.prompt_len, length) + length * self.cost_tangent(track.tpot_s)[1]
        excess = self.tenants.excess(request.tenant, now_s)
        price_s = self._price_s(request, work_s, excess)
        work_s *= 1 + excess
        more_s = work_s - track.work_s
        if more_s > 0:
            self.tenants.charge(request.tenant, more_s, now_s)
            self.price.correct(Offer(now_s, more_s, price_s, track.tpot_s))
            track.work_s, track.price_s, track.excess = work_s, price_s, excess

    def _price_s(self, request: Request, work_s: float, excess: float) -> float:
        """Return what is compared with the price limit: more for a heavy tenant, less for a better priority."""
        price_s = self.price.price_s(work_s, self.options.slack_fairness)
        return price_s * (1 + excess) * self.tuning.priority_price ** self._level(request)

    def _level(self, request: Request) -> int:
        """Return its priority within the limits."""
        most = self.tuning.priority_levels
        return max(-most, min(most, request.priority))

    def _decode_s(self, context: int, length: float) -> float:
        """Return the machine time of `length` output tokens after `context` others."""
        return length * (self.cost.params.row_s + self.cost.params.context_s * (context + length / 2))

    def _set_aside(self, track: Track, now_s: float) -> None:
        """Let a request decode in spare time from now on."""
        track.idle_s = now_s
        track.is_promised = False
        self.unpromised[track.request.request_id] = track
        self.demoted += track.tpot_s < inf

    # --- demand and capacity ------------------------------------------------------------------------------------
    def refresh_demand(self, now_s: float, slacks: Sequence[float], context: Sequence[int], smallest_s: float) -> None:
        """Recompute the demand of running requests at intervals; requests that start in between are added."""
        if now_s - self._refreshed_s < self.tuning.refresh_s:
            return
        self._refreshed_s = now_s
        if self._stalled_s > -inf:
            stalls = self.cost.stalls
            self.stall_s = stalls.typical_s if stalls.share > 0.005 else 0.0
            self.stalled = stalls.share
        row_s, context_s, tracks = self.cost.params.row_s, self.cost.params.context_s, self.batch.tracks
        left = self.left(context)
        self.growth = sum(left) + sum([track.length for track in self.ledger.filling.values()])
        weights = [
            (row_s + context_s * (n + more / 2)) / track.pace_s
            for track, n, more in zip(tracks, context, left, strict=True)
        ]
        self.can_wait_weight = sum([w for w, t in zip(weights, tracks, strict=True) if t.can_wait])
        paces_s, experts = [track.tpot_s for track in tracks], self.cost.params.experts is not None
        self.demand = Demand.of(slacks, weights, paces_s, min(smallest_s, 1.0), self.arriving(now_s), experts)
        for track in self.ledger.filling.values():
            self.demand = self.demand_with(self.demand, track, self.to_fill_s(track), now_s)
        self.batch.follow_margins()

    def left(self, context: Sequence[int]) -> list[float]:
        """Return the tokens that each request of the batch is expected to add."""
        left, pairs = self.lengths.left, zip(self.batch.tracks, context, strict=True)
        return [left(track.request, max(1, n - track.request.prompt_len)) for track, n in pairs]

    def demand_with(self, demand: Demand, track: Track, prefill_s: float, now_s: float) -> Demand:
        """Return the demand with one more request; a request without promises adds nothing."""
        if not track.is_promised:
            return demand
        due_s = min(track.due_s, now_s + self.tuning.ageing_s) - now_s
        return demand.with_one(track.weight, track.tpot_s, prefill_s, due_s)

    def to_fill_s(self, track: Track) -> float:
        """Return the machine time of the rest of a running request's prompt."""
        request = track.request
        beside = max(0.0, self.beside - request.remaining)
        return self.cost.params.prefill_s(request.planned, request.remaining, beside)

    @property
    def beside(self) -> float:
        """Mean tokens of a step (decoding rows and started prompts), which set the cost of experts for more tokens. It
        is 0 for a model without experts.
        """
        if self.cost.params.experts is None:
            return 0.0
        filling = sum([track.request.remaining for track in self.ledger.filling.values()])
        return filling + len(self.unpromised) + self.batch.rows

    def cost_tangent(self, pace_s: float) -> tuple[float, float]:
        """Return `CostParams.cost_tangent` at the mean context of the batch."""
        params, batch = self.cost.params, self.batch
        if params.experts is None:  # without experts, contexts do not matter
            return params.cost_tangent(pace_s, 0.0)
        return params.cost_tangent(pace_s, batch.context_per_s / batch.tokens_per_s if len(batch) else 0.0)

    def arriving(self, now_s: float) -> float:
        """Return the share of the time that started prompts took recently."""
        since_s = max(0.0, now_s - self._arrived_s)
        return min(self.tuning.prefill_share, self._arriving * exp(-since_s / self.tuning.recent_s))

    def _arrive(self, prefill_s: float, now_s: float) -> None:
        """Record a started prompt of `prefill_s` seconds. A long one is capped, because the next may be far off."""
        tuning = self.tuning
        self._arriving = self.arriving(now_s) + min(prefill_s, tuning.longest_prompt_s) / tuning.recent_s
        self._arrived_s = now_s

    def usable_share(self, smallest_s: float) -> float:
        """Return the share of the time left by margin and stalls, at this smallest TPOT objective (inf: none)."""
        return (1 - self.margins.of(smallest_s) if smallest_s < inf else 1.0) - self.stalled

    @property
    def chunk_ends_s(self) -> float:
        """Delay of a first token in addition to its prompt's turn: the step in flight, and the end of its own step."""
        p, idle = self.cost.params, not len(self.batch)  # if idle, no row reads experts for it
        return max(p.step_s + (p.experts_s(inf) if idle else 0.0), 2 * self.recent_step_s)

    def is_affordable(self, track: Track) -> bool:
        """True if a request is worth its cost under the present limits; also updates its cause."""
        found = self.price.objection(track.price_s, track.tpot_s, track.can_wait)
        if found is None:
            if track.waits_for in PRICED:  # until its cause is known
                self.set_cause(track, Cause.UTILISATION)
                track.waits_for = None
        elif track.waits_for is not found and track.waits_for in _UNPRICED_CAUSES:
            self.set_cause(track, self.objection(track) or found)
        return found is None

    def objection(self, track: Track) -> Cause | None:
        """Return why it is not worth its cost, None if it is; TENANT if only its tenant's excess is the reason."""
        price, can_wait = self.price, track.can_wait
        found = price.objection(track.price_s, track.tpot_s, can_wait)
        if found is Cause.PRICE and track.excess:
            own_s = track.price_s / (1 + track.excess)
            found = price.objection(own_s, track.tpot_s, can_wait) or Cause.TENANT
        return found

    def set_cause(self, track: Track, cause: Cause) -> None:
        """Set what a waiting request waits for."""
        if track.waits_for is not cause:
            track.waits_for = cause
            self.cause_changes.append((track.request, cause))

    def prefill_s(self, tokens: int) -> float:
        """Return the time of a prompt on an idle machine."""
        return self.cost.params.step_s + self.cost.params.prefill_s(0, tokens)

    def unattainable(self, track: Track) -> bool:
        """True if its TPOT objective is shorter than a step alone, or its deadline too close for its least length."""
        if self.cost.steps < MIN_TRUSTED_STEPS:
            return False
        alone_s = self.alone_s(track)
        least_s = alone_s * (track.length - self.wrong_by(track))
        return track.tpot_s < alone_s or least_s > track.end_s - track.request.arrival_s

    def misses_alone(self, track: Track) -> bool:
        """True if even an idle machine would have rejected it at its arrival."""
        slo, alone_s = track.request.slo, self.alone_s(track)
        first_s = self.prefill_s(len(track.tokens))
        whole_s = first_s + alone_s * max(0.0, track.length - self.wrong_by(track))
        late = slo is not None and first_s > min(slo.ttft_s or inf, self._latest_s(track, MIN_PACE_STEPS * alone_s))
        return late or whole_s > track.end_s - track.request.arrival_s or self.unattainable(track)

    def alone_s(self, track: Track) -> float:
        """Return the time of a step with this request alone."""
        return self.cost.params.rows_s(1, len(track.tokens))

    def unreachable(self, view: View, now_s: float) -> list[Track]:
        """Return the waiting requests that even an idle machine could no longer serve in time."""
        found = []
        for track in self.backlog.overdue(now_s):
            if not rejectable(track.request):
                continue
            latest_s = track.due_s - view.load_s(track.request) - self.prefill_s(view.uncached(track.request))
            if latest_s < now_s and view.can_start(track.request):
                found.append(track)
            elif track.due_s >= now_s:
                self.backlog.watch(track, max(latest_s, now_s))
        return found
