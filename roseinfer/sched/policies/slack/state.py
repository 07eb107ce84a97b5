"""What the slack policy knows from step to step: the policy tells it what happens, and each step is planned from it."""

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

FASTEST = 1.1  # times a step that holds it alone: no request asks for a faster pace than that to be in time
HELD_UP = 2.0  # the same, from the first token to an end: faster holds up all others for one guess of a length
UNKNOWN = 256.0  # tokens by which an expected length is wrong, before it is known better
LIKELY = 64.0  # tokens that many outputs have, whatever was expected of them
FEW = 0.1  # of those that run
GIVE_UP = 1.5  # times as many that could be served at a slower pace: for that, promises of a faster one are broken
HURRY = 0.75  # of the pace at its start, to which one that falls behind its end is hurried at most
# What a request waits for that has not been found to lack anything but its price.
_UNPRICED = (None, Cause.UTILISATION, *PRICED)
SURE_STEPS = 50  # after which the cost model is trusted to call an objective unattainable


class SlackState:
    """`batch`: those that decode and are owed a token in time. `leftover`: those that decode and are owed nothing, by
    id: best effort, or demoted. `promised`: live requests with objectives. `demoted`: of `leftover`, those with a TPOT
    objective. `growth`: tokens that the running requests are expected to add. `rest_again_s`: when the
    next one without objectives may start before others. `recent_step_s`: the mean time between tokens, lately.
    `news`: who waits for something else than before, since it was taken last.
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
        self.leftover: dict[str, Track] = {}
        self.demand = Demand.of([], [], [], 0.05)
        self.backlog = Backlog()
        self.price = PriceLimit(tuning.price_window_s, tuning.price_fill)
        self.news: list[tuple[Request, Cause]] = []
        self.tenants = TenantShares()
        self.promised = self.demoted = 0
        self.patient = 0.0
        self.growth = self.recent_step_s = 0.0
        self.length_error = UNKNOWN
        self.rest_again_s = -inf
        self.preempted: dict[str, Track] = {}
        self._unseen: dict[str, Track] = {}  # whose first token is still on its way
        self._refreshed_s = self._repriced_s = self._stalled_s = -inf
        self.stall_s = self.stalled = 0.0
        self._arriving = self._arrived_s = 0.0

    # --- what happens -------------------------------------------------------------------------------------------
    def stepped(self, work: Work, duration_s: float, now_s: float) -> None:
        """A step took `duration_s`, and has just ended."""
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
            self.name(track, Cause.BLOCKS)
            if request.num_outputs > track.length:  # it has outlived what was expected of it
                track.length = request.num_outputs + self.lengths.left(request, request.num_outputs)
        else:
            self.promised += request.slo is not None
            track.length = self.lengths.total(request)
            self._bound_whole(track)
            if request.num_outputs:
                self._take_over(track)
        prefill_s = p.prefill_s(0, len(track.tokens), self.beside)
        pace_s = min(track.tpot_s, self.batch.smallest_s)
        constant_s, expert_s = self.line(pace_s)
        decode_s = self._decode_s(len(track.tokens), track.length) + track.length * expert_s
        track.work_s = prefill_s
        if track.tpot_s < inf:  # else nothing is promised for the rest
            track.work_s += decode_s
        track.weight = (p.row_s + p.context_s * (len(track.tokens) + track.length / 2)) / track.tpot_s
        if request.has_run and track.anchor_s < inf and track.owed:  # it is owed its next token, no sooner
            track.due_s = track.anchor_s + track.pace_s * len(track.tokens)
            self.preempted[request.request_id] = track
        track.key = request.arrival_s + min(track.ttft_s, self.tuning.ageing_s, 0.1 * (track.end_s - request.arrival_s))
        track.excess = excess = self.tenants.excess(request.tenant, request.arrival_s)
        track.key += self.tuning.priority_s * self._level(request) + self.tuning.fairness_s * excess
        if track.tpot_s < inf:
            # The constant part of a step is paid anyway, so a second of decoding costs more than one of prefill.
            scarce = 1 / max(0.2, 1 - constant_s / pace_s)
            weight = self.tuning.cost_weight * (1 - self.options.slack_fairness)
            track.key += weight * (prefill_s + scarce * decode_s)
        track.price_s = self._price_s(request, track.work_s, excess)
        if track.owed and not request.has_run:
            tokens = track.length if track.tpot_s < inf else 0.0
            self.price.offer(
                Offer(request.arrival_s, track.work_s, track.price_s, track.tpot_s, track.patient, tokens, expert_s)
            )
        track.work_s *= 1 + excess
        if request.has_run and track.owed and track.due_s < inf:
            track.key = track.due_s - prefill_s
        self.backlog.add(track, not track.owed or request.has_run or self.worth(track))
        if track.ttft_s < inf:
            self.backlog.watch(track, track.due_s - p.prefill_s(0, len(track.tokens)) - p.step_s)

    def admitted(self, track: Track, now_s: float) -> None:
        """It has its first row, which is planned: `to_fill_s` is what comes behind that."""
        self.preempted.pop(track.request.request_id, None)
        if track.owed and not track.request.has_run:
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
        # A stall says nothing of how near to their limits steps may be planned, nor does the end of another engine.
        steady = request.first_token_s > self._stalled_s and not request.resumed
        if track.tpot_s < inf and track.end_s == inf and event.num_outputs > 1 and steady:
            spent_s = event.now_s - request.first_token_s
            self.margins.observe(spent_s / (event.num_outputs - 1), track.tpot_s)

    def _take_over(self, track: Track) -> None:
        """It comes from another engine: its deadlines go on from there, and its length from what it has."""
        request = track.request
        track.length = max(track.length, request.num_outputs + self.lengths.left(request, request.num_outputs))
        if track.tpot_s < inf:
            track.set_pace(self.margins.of(track.tpot_s), request.first_token_s, request.prompt_len)

    def _bound_whole(self, track: Track) -> None:
        """What a deadline for the last token asks of the first, if steps go on as they do, and of the others.

        A tenth of the time is left for the prompt; from the first token on it is known what the others have.
        """
        if track.end_s == inf:
            return
        arrival_s, behind = track.request.arrival_s, track.length + self.wrong_by(track)
        whole_s = track.end_s - arrival_s
        latest_s = self._latest_s(track, max(FASTEST * self.alone_s(track), self.recent_step_s))
        if latest_s < track.ttft_s:
            track.ttft_s, track.due_s = latest_s, arrival_s + latest_s
        track.tpot_s = min(track.tpot_s, max(0.9 * whole_s / max(1.0, behind), FASTEST * self.alone_s(track)))

    def _latest_s(self, track: Track, step_s: float) -> float:
        """From its arrival to its first token at most, that so long an output as it may have can be in time."""
        whole_s = track.end_s - track.request.arrival_s
        return max(whole_s - step_s * (track.length + self.wrong_by(track)), 0.1 * whole_s)

    def wrong_by(self, track: Track) -> float:
        """Tokens by which its expected length may be wrong: as others were, but at most half of it, or `LIKELY`."""
        return min(self.length_error, max(0.5 * track.length, LIKELY))

    def _pace_whole(self, track: Track, now_s: float) -> None:
        """From now on its tokens are spread over what is left of the time for the whole request."""
        slo = track.request.slo
        assert slo is not None
        left = self.lengths.left(track.request, max(1, track.outputs))
        track.length = track.outputs + left
        own_s = slo.tpot_s or inf
        worth_s = max(self.price.pace_s, self.price.fastest_s)
        least_s = max(HELD_UP * self.alone_s(track), worth_s, track.floor_s)
        pace_s = max((track.end_s - now_s) / (left + 0.25 * track.outputs + self.wrong_by(track)), least_s)
        if not track.floor_s:
            track.floor_s = HURRY * pace_s
        track.tpot_s = min(own_s, pace_s)

    def _leave(self, track: Track) -> None:
        """It decodes no longer."""
        name = track.request.request_id
        if self.leftover.pop(name, None) is not None:
            self.demoted -= track.tpot_s < inf
        self._unseen.pop(name, None)
        self.preempted.pop(name, None)
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
            if track.end_s < inf:
                self._pace_whole(track, first_s or now_s)
            if track.tpot_s == inf or track.doomed or self.unattainable(track):
                self._set_aside(track, now_s)
                continue
            self.batch.add(track, first_s or now_s)
            if not first_s:
                self._unseen[name] = track

    def give_up_paces(self, now_s: float) -> None:
        """If far more could be served at a slower pace, those that run and need a faster one take what is left over.

        They started before so many came; to keep a promise to few would break one in most others' way.
        """
        if self.price.gain >= GIVE_UP and self.ledger.waiting:
            fast = [track for track in self.batch.tracks if self.gives_up(track)]
            if len(fast) <= FEW * len(self.batch):
                for track in fast:
                    self.demote(track, now_s)

    def gives_up(self, track: Track) -> bool:
        """Whether its pace is faster than the one at which far more could be served, and may be given up for that."""
        return self.price.gain >= GIVE_UP and track.tpot_s < self.price.pace_s and track.end_s == inf

    def pace_outlived(self, now_s: float) -> None:
        """Those that were promised an end, and have outlived what was expected of them, need a faster pace."""
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
        for track in [track for track in self.batch.tracks if track.request.hinted and self._doubtful(track)]:
            if track.outputs > tuning.hint_factor * (track.request.predicted_len or 0) + tuning.hint_tokens:
                self._reprice(track, track.outputs + self.lengths.left(track.request, track.outputs), now_s)
                if track.price_s > limit_s:
                    self.demote(track, now_s)

    def _doubtful(self, track: Track) -> bool:
        """Whether a hint counts for more than it proved worth: not enough of its source have ended to tell."""
        return not self.lengths.known(track.request)

    def _reprice(self, track: Track, length: float, now_s: float) -> None:
        """An output is `length` tokens long in all, and not as short as its client said: its tenant pays the rest."""
        request = track.request
        prefill_s = self.cost.params.prefill_s(0, request.prompt_len, self.beside)
        work_s = prefill_s + self._decode_s(request.prompt_len, length) + length * self.line(track.tpot_s)[1]
        excess = self.tenants.excess(request.tenant, now_s)
        price_s = self._price_s(request, work_s, excess)
        work_s *= 1 + excess
        more_s = work_s - track.work_s
        if more_s > 0:
            self.tenants.charge(request.tenant, more_s, now_s)
            self.price.correct(Offer(now_s, more_s, price_s, track.tpot_s))
            track.work_s, track.price_s, track.excess = work_s, price_s, excess

    def _price_s(self, request: Request, work_s: float, excess: float) -> float:
        """What counts against the price limit: more for a tenant that has had much, less for a better priority."""
        price_s = self.price.price_s(work_s, self.options.slack_fairness)
        return price_s * (1 + excess) * self.tuning.priority_price ** self._level(request)

    def _level(self, request: Request) -> int:
        """Its priority, as far as one counts."""
        most = self.tuning.priority_levels
        return max(-most, min(most, request.priority))

    def _decode_s(self, context: int, length: float) -> float:
        """What `length` tokens take of the machine after `context` others."""
        return length * (self.cost.params.row_s + self.cost.params.context_s * (context + length / 2))

    def _set_aside(self, track: Track, now_s: float) -> None:
        """It takes what is left over from now on."""
        track.idle_s = now_s
        track.owed = False
        self.leftover[track.request.request_id] = track
        self.demoted += track.tpot_s < inf

    # --- what is needed, and what there is -----------------------------------------------------------------------
    def refresh_demand(self, now_s: float, slacks: Sequence[float], context: Sequence[int], smallest_s: float) -> None:
        """From the requests that run, now and then; in between, those that start are added."""
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
        self.patient = sum([w for w, t in zip(weights, tracks, strict=True) if t.patient])
        paces_s, experts = [track.tpot_s for track in tracks], self.cost.params.experts is not None
        self.demand = Demand.of(slacks, weights, paces_s, min(smallest_s, 1.0), self.arriving(now_s), experts)
        for track in self.ledger.filling.values():
            self.demand = self.demand_with(self.demand, track, self.to_fill_s(track), now_s)
        self.batch.follow_margins()

    def left(self, context: Sequence[int]) -> list[float]:
        """Tokens that each request of the batch is expected to add."""
        left, pairs = self.lengths.left, zip(self.batch.tracks, context, strict=True)
        return [left(track.request, max(1, n - track.request.prompt_len)) for track, n in pairs]

    def demand_with(self, demand: Demand, track: Track, prefill_s: float, now_s: float) -> Demand:
        """A request that takes what is left adds nothing."""
        if not track.owed:
            return demand
        due_s = min(track.due_s, now_s + self.tuning.ageing_s) - now_s
        return demand.with_one(track.weight, track.tpot_s, prefill_s, due_s)

    def to_fill_s(self, track: Track) -> float:
        """Seconds of the machine that the rest of a running request's prompt takes."""
        request = track.request
        beside = max(0.0, self.beside - request.remaining)
        return self.cost.params.prefill_s(request.planned, request.remaining, beside)

    @property
    def beside(self) -> float:
        """Tokens that a step has anyway, as far as that decides on the price of more: those of requests that decode, in
        the mean, and of prompts that fill.
        """
        if self.cost.params.experts is None:
            return 0.0
        filling = sum([track.request.remaining for track in self.ledger.filling.values()])
        return filling + len(self.leftover) + self.batch.rows

    def line(self, pace_s: float) -> tuple[float, float]:
        """What any step costs, and what the experts of a row cost, on a full machine that has one every `pace_s`."""
        params, batch = self.cost.params, self.batch
        if params.experts is None:  # then contexts do not matter
            return params.cost_tangent(pace_s, 0.0)
        return params.cost_tangent(pace_s, batch.context_per_s / batch.tokens_per_s if len(batch) else 0.0)

    def arriving(self, now_s: float) -> float:
        """The share of the time that prompts of requests that started have taken lately."""
        since_s = max(0.0, now_s - self._arrived_s)
        return min(self.tuning.prefill_share, self._arriving * exp(-since_s / self.tuning.recent_s))

    def _arrive(self, prefill_s: float, now_s: float) -> None:
        """A prompt of `prefill_s` started. One counts for no more than what others bring in a while: the next long one
        is not as near as the last.
        """
        tuning = self.tuning
        self._arriving = self.arriving(now_s) + min(prefill_s, tuning.longest_prompt_s) / tuning.recent_s
        self._arrived_s = now_s

    def keep(self, smallest_s: float) -> float:
        """The share of the time that may be planned with if this is the smallest TPOT objective (inf: there is none):
        what the margin and stalls leave.
        """
        return (1 - self.margins.of(smallest_s) if smallest_s < inf else 1.0) - self.stalled

    @property
    def chunk_ends_s(self) -> float:
        """What a first token waits for beyond its prompt's turn: the step in flight, and the end of its own."""
        p, idle = self.cost.params, not len(self.batch)  # then no row reads experts for it
        return max(p.step_s + (p.experts_s(inf) if idle else 0.0), 2 * self.recent_step_s)

    def worth(self, track: Track) -> bool:
        """Whether a request is worth its cost while not all can be served."""
        found = self.price.objection(track.price_s, track.tpot_s, track.patient)
        if found is None:
            if track.waits_for in PRICED:  # and now for its turn, like most; the next look will tell
                self.name(track, Cause.UTILISATION)
                track.waits_for = None
        elif track.waits_for is not found and track.waits_for in _UNPRICED:
            self.name(track, self.objection(track) or found)
        return found is None

    def objection(self, track: Track) -> Cause | None:
        """Why it is not worth its cost, if it is not; its tenant if that is all."""
        price, patient = self.price, track.patient
        found = price.objection(track.price_s, track.tpot_s, patient)
        if found is Cause.PRICE and track.excess:
            own_s = track.price_s / (1 + track.excess)
            found = price.objection(own_s, track.tpot_s, patient) or Cause.TENANT
        return found

    def name(self, track: Track, cause: Cause) -> None:
        """It waits for this from now on."""
        if track.waits_for is not cause:
            track.waits_for = cause
            self.news.append((track.request, cause))

    def prefill_s(self, tokens: int) -> float:
        """On a machine that does nothing else."""
        return self.cost.params.step_s + self.cost.params.prefill_s(0, tokens)

    def unattainable(self, track: Track) -> bool:
        """Whether its TPOT objective is shorter than a step that holds nothing else, or its end too near for what it
        has at least.
        """
        if self.cost.steps < SURE_STEPS:
            return False
        alone_s = self.alone_s(track)
        least_s = alone_s * (track.length - self.wrong_by(track))
        return track.tpot_s < alone_s or least_s > track.end_s - track.request.arrival_s

    def misses_alone(self, track: Track) -> bool:
        """Whether it would be turned away by an idle machine as well, had it started when it came."""
        slo, alone_s = track.request.slo, self.alone_s(track)
        first_s = self.prefill_s(len(track.tokens))
        whole_s = first_s + alone_s * max(0.0, track.length - self.wrong_by(track))
        late = slo is not None and first_s > min(slo.ttft_s or inf, self._latest_s(track, FASTEST * alone_s))
        return late or whole_s > track.end_s - track.request.arrival_s or self.unattainable(track)

    def alone_s(self, track: Track) -> float:
        """A step that holds this request and nothing else."""
        return self.cost.params.rows_s(1, len(track.tokens))

    def hopeless(self, view: View, now_s: float) -> list[Track]:
        """Those waiting that even an idle machine could not serve in time any more."""
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
