"""What the slack policy knows from step to step: the policy tells it what happens, and each step is planned from it."""

from collections.abc import Sequence
from math import inf

from roseinfer.core.config import SchedulerConfig
from roseinfer.core.events import Ended
from roseinfer.core.outputs import COMPLETE
from roseinfer.sched.cost import Work
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.ledger import Batch, Ledger, Track
from roseinfer.sched.policies.slack.backlog import Backlog
from roseinfer.sched.policies.slack.capacity import Demand, Margin, PriceLimit
from roseinfer.sched.policies.slack.tuning import Tuning
from roseinfer.sched.policy import View, rejectable
from roseinfer.sched.prefill import PrefillOptions
from roseinfer.sched.tenants import TenantShares

SURE_STEPS = 50  # after which the cost model is trusted to call an objective unattainable


class SlackState:
    """`batch`: those that decode and are owed a token in time. `leftover`: those that decode and are owed nothing, by
    id: best effort, or demoted. `promised`: live requests with objectives. `demoted`: of `leftover`, those with a TPOT
    objective. `growth`: tokens that the running requests are expected to add. `prompt_rate`: prompt tokens a second,
    over the last one. `rest_started_s`: when a request without objectives last started.
    """

    def __init__(self, config: SchedulerConfig, options: PrefillOptions, known: Estimates, tuning: Tuning) -> None:
        self.options = options
        self.tuning = tuning
        self.seats = config.max_running
        self.cost = known.cost
        self.lengths = known.lengths
        self.ledger = Ledger()
        self.margin = Margin()
        self.batch = Batch(self.margin.value)
        self.leftover: dict[str, Track] = {}
        self.demand = Demand.of([], [], 0.05)
        self.backlog = Backlog()
        self.price = PriceLimit(tuning.price_window_s, tuning.price_fill)
        self.tenants = TenantShares()
        self.promised = self.demoted = 0
        self.growth = self.prompt_rate = 0.0
        self.rest_started_s = -inf
        self._unseen: dict[str, Track] = {}  # whose first token is still on its way
        self._refreshed_s = self._repriced_s = -inf

    # --- what happens -------------------------------------------------------------------------------------------
    def stepped(self, work: Work, duration_s: float) -> None:
        """A step took `duration_s`."""
        self.cost.observe(work, duration_s)
        lasted_s = max(duration_s, 1e-6)
        self.prompt_rate += min(1.0, lasted_s) * (work.prompt_tokens / lasted_s - self.prompt_rate)

    def queued(self, track: Track) -> None:
        request, p = track.request, self.cost.params
        if request.preemptions:
            self._leave(track)
            if request.num_outputs > track.length:  # it has outlived what was expected of it
                track.length = request.num_outputs + self.lengths.left(request, request.num_outputs)
        else:
            self.promised += request.slo is not None
            track.length = self.lengths.total(request)
            track.bound_whole()
        prefill_s = p.token_s * len(track.tokens)
        decode_s = self._decode_s(len(track.tokens), track.length)
        track.work_s = prefill_s + decode_s
        track.weight = (p.row_s + p.context_s * (len(track.tokens) + track.length / 2)) / track.tpot_s
        track.key = request.arrival_s + min(track.ttft_s, self.tuning.ageing_s)
        excess = self.tenants.excess(request.tenant, request.arrival_s)
        most = self.tuning.priority_levels
        track.key += self.tuning.priority_s * max(-most, min(most, request.priority)) + self.tuning.fairness_s * excess
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

    def admitted(self, track: Track, now_s: float) -> None:
        self.demand = self.demand_with(self.demand, track, track.request.remaining, now_s)
        self.growth += track.length
        self.tenants.charge(track.request.tenant, track.work_s, now_s)
        if track.request.slo is None:
            self.rest_started_s = now_s

    def ended(self, track: Track, event: Ended) -> None:
        request = track.request
        self.promised -= request.slo is not None
        self._leave(track)
        if request.hinted and event.num_outputs > (request.predicted_len or 0):
            self._reprice(track, event.num_outputs, event.now_s)
        if event.reason not in COMPLETE:
            return
        self.lengths.finished(request, event.num_outputs)
        if track.tpot_s < inf and event.num_outputs > 1:
            spent_s = event.now_s - request.first_token_s
            self.margin.observe(spent_s / (event.num_outputs - 1), track.tpot_s)
            if abs(self.margin.value - self.batch.margin) > 5e-4:
                self.batch.set_margin(self.margin.value)

    def _leave(self, track: Track) -> None:
        """It decodes no longer."""
        name = track.request.request_id
        if self.leftover.pop(name, None) is not None:
            self.demoted -= track.tpot_s < inf
        self._unseen.pop(name, None)
        if track in self.batch:
            self.batch.remove(track)

    # --- stages -------------------------------------------------------------------------------------------------
    def promote(self, now_s: float) -> None:
        """Those whose prompt is planned to its end decode from now on, and deadlines count from first tokens seen."""
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

    def demote_outlived(self, now_s: float) -> None:
        """While more is asked than can be done: price those anew that outlived what their clients said. Who costs more
        than what starts at present takes what is left over from now on: a hint must not buy a place.
        """
        tuning, limit_s = self.tuning, self.price.limit_s
        if limit_s == inf or not self.ledger.waiting or now_s - self._repriced_s < tuning.refresh_s:
            return
        self._repriced_s = now_s
        for track in [track for track in self.batch.tracks if track.request.hinted]:
            if track.outputs > tuning.hint_factor * (track.request.predicted_len or 0) + tuning.hint_tokens:
                self._reprice(track, track.outputs + self.lengths.left(track.request, track.outputs), now_s)
                if track.work_s > limit_s:
                    self.demote(track, now_s)

    def _reprice(self, track: Track, length: float, now_s: float) -> None:
        """An output is `length` tokens long in all, and not as short as its client said: its tenant pays the rest."""
        request = track.request
        work_s = self.cost.params.token_s * request.prompt_len + self._decode_s(request.prompt_len, length)
        work_s *= 1 + self.tenants.excess(request.tenant, now_s)
        more_s = work_s - track.work_s
        if more_s > 0:
            self.tenants.charge(request.tenant, more_s, now_s)
            self.price.correct(now_s, more_s, work_s)
            track.work_s = work_s

    def _decode_s(self, context: int, length: float) -> float:
        """What `length` tokens take of the machine after `context` others."""
        return length * (self.cost.params.row_s + self.cost.params.context_s * (context + length / 2))

    def _set_aside(self, track: Track, now_s: float) -> None:
        """It takes what is left over from now on."""
        track.idle_s = now_s
        self.leftover[track.request.request_id] = track
        self.demoted += track.tpot_s < inf

    # --- what is needed, and what there is -----------------------------------------------------------------------
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
