"""Admission of the slack policy: which waiting requests start, which wait, and which are rejected."""

from bisect import insort
from collections.abc import Iterator, Sequence
from math import inf

from roseinfer.core.request import Request
from roseinfer.core.slo import Cause, Forecast, Rejection
from roseinfer.sched.lengths.estimators import peak_tokens
from roseinfer.sched.policies.common.ledger import Track
from roseinfer.sched.policies.slack.attainable import Chances
from roseinfer.sched.policies.slack.backlog import Entry, first_of
from roseinfer.sched.policies.slack.capacity import MAX_CONSTANT_SHARE, PRICED
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policy import RejectedRequest, Verdict, View, rejectable

MIN_PREFILL_SHARE = 0.13  # of the machine, when judging whether a prompt can be in time
MAX_CAN_WAIT_SHARE = 0.9  # of the usable machine, for requests that can wait, under overload
PREFERRED_CAUSES = (*PRICED, Cause.UTILISATION)  # named rather than other causes that hold as well
URGENT_RESERVE_SHARE = 0.15  # of the machine, which requests that can wait leave free under overload


class SlackAdmission:
    """Admission in one step. `admitted`: requests with their prompt tokens, which start while the step has tokens.
    `default_cause`: cause of all requests that are not named; None if none had to wait.
    """

    def __init__(self, state: SlackState, view: View, now_s: float) -> None:
        self.admitted: list[tuple[Track, int]] = []
        self.rejections: dict[str, RejectedRequest] = {}
        self.yields: list[Request] = []
        self.default_cause: Cause | None = None
        self._limit = 1.0  # utilisation limit of the present walk
        self._is_new = False  # the present request is considered for the first time
        self._state = state
        self._tuning = state.tuning
        self._params = state.cost.params
        self._view = view
        self._now_s = now_s
        self._reserved: list[Track] = []  # cannot start yet, but hold a reservation

    def run(self, slacks: Sequence[float], context: Sequence[int]) -> None:
        """Admit in order while demand fits, and then requests above the price limit if there is room to spare.
        `slacks`, `context`: seconds and tokens of the requests in the batch.
        """
        state, view = self._state, self._view
        for track in state.unreachable(view, self._now_s):
            self._reject(track, track.first_objective, state.prefill_s(len(track.tokens)))
        if not state.ledger.waiting:
            return
        self._context, self._slacks = context, slacks
        self._seats = min(view.free_seats, state.seats - len(view.running))
        self._blocks = view.free_blocks
        self._smallest_s = min([track.tpot_s for track in state.ledger.filling.values()], default=inf)
        if len(state.batch):
            self._smallest_s = min(self._smallest_s, state.batch.smallest_s)
        self._usable_share = state.usable_share(self._smallest_s)
        self._is_update = state.price.update(self._now_s, self._usable_share, state.cost_tangent)
        if self._is_update:
            state.backlog.sort_by_price(state.is_affordable)
        state.refresh_demand(self._now_s, slacks, context, self._smallest_s)
        self._demand, self._growth, self._beside = state.demand, state.growth, state.beside
        filling = state.ledger.filling.values()
        self._prompt_queue = sorted([(t.due_s, state.to_fill_s(t)) for t in filling if t.is_promised])
        self._start_aged()
        self._walk(state.backlog.affordable, 1.0)
        self._walk(state.backlog.parked, self._tuning.roomy)
        self._walk_rest()
        if self.rejections:
            self._explain_rejections()

    def _explain_rejections(self) -> None:
        """Add attainable objectives to the rejections, given all starts, and causes for requests that had none yet."""
        self._limit = 1.0
        chances = Chances(
            self._state,
            self._now_s,
            self._demand,
            self._smallest_s,
            sum([seconds for _, seconds in self._prompt_queue]),
            not self._view.running and not self.admitted,
            self._prefill_time,
            lambda track: self._seats > 0 and self._has_blocks(track),
        )
        for name, (request, rejection) in self.rejections.items():
            track = self._state.ledger.waiting[name]
            track.count_uncached(self._view.uncached)
            cause = self._too_late_for(track) if rejection.cause is Cause.OTHER else rejection.cause
            least_s = chances.least_s(track, rejection.reason, self._view.load_s(request))
            self.rejections[name] = RejectedRequest(request, rejection._replace(cause=cause, attainable_s=least_s))

    def _reject(self, track: Track, reason: str, wait_s: float) -> None:
        cause = Cause.IDLE if self._state.misses_alone(track) else track.waits_for or Cause.OTHER
        predicted_s = self._now_s - track.request.arrival_s + wait_s
        if self._state.is_affordable(track):
            self._state.price.decided(refused=True)
        rejection = Rejection(reason, predicted_s, cause)
        self.rejections[track.request.request_id] = RejectedRequest(track.request, rejection)

    def _keep_queued(self, track: Track, cause: Cause, verdict: Verdict = Verdict.SKIP) -> Verdict:
        """Record why `track` stays queued. UTILISATION wins over other causes: running requests hold what it lacks.
        PRICE wins over UTILISATION for requests above the price limit. The check is repeated only at intervals, because
        it costs as much as the decision.
        """
        known = track.waits_for
        if self._is_update or cause is Cause.QUEUE or (known is not cause and known not in PREFERRED_CAUSES):
            self._set_cause(track, cause)
        if self._limit == 1.0:
            self.default_cause = track.waits_for
        return verdict

    def _set_cause(self, track: Track, cause: Cause) -> None:
        if cause is not Cause.UTILISATION and not self._fits(track):
            cause = Cause.UTILISATION
        elif cause is Cause.QUEUE and (self._is_update or track.waits_for is not cause) and not self._has_blocks(track):
            cause = Cause.BLOCKS  # it lacks blocks for longer than its turn
        if cause is Cause.UTILISATION and self._limit < 1.0:
            cause = self._state.objection(track) or cause
        self._state.set_cause(track, cause)

    def _fits(self, track: Track) -> bool:
        """True if there is time for its tokens together with the running requests."""
        smallest_s = min(self._smallest_s, track.tpot_s)
        if smallest_s == inf or track.request.has_run or not (self._view.running or self.admitted):
            return True
        return self._demand.fits(self._limit, self._state.usable_share(smallest_s), self._params, track.weight)

    def _own_s(self, track: Track, prompt: int) -> float:
        """Return the time of a request's last `prompt` tokens, in a step with the other tokens that it has anyway.
        Without decoding rows that limit it, a step is full of prompts.
        """
        beside = self._beside if self._smallest_s < inf else inf
        return self._params.prefill_s(len(track.tokens) - prompt, prompt, beside)

    def _ahead_s(self, track: Track) -> float:
        """Return the time of the started prompts that are due no later than this one."""
        return sum([seconds for due_s, seconds in self._prompt_queue if due_s <= track.due_s])

    def _forecast(self, track: Track) -> Forecast:
        """Predict first token and pace of a request that is considered for the first time, if it starts now."""
        p, waited_s = self._params, self._now_s - track.request.arrival_s + self._view.load_s(track.request)
        ahead_s = self._ahead_s(track)
        own_s = self._own_s(track, track.count_uncached(self._view.uncached))
        pace_s = max(self._state.alone_s(track), min(track.tpot_s, self._state.recent_step_s))
        return Forecast(waited_s + (ahead_s + own_s) / self._prefill_time(1.0) + p.step_s, pace_s)

    @property
    def _full_s(self) -> float:
        """Time of the tokens of a step full of prompts."""
        return self._params.prefill_s(0, self._view.token_budget, inf)

    def _overhead(self, smallest_s: float) -> float:
        """Return the time share of the constant cost of steps, if the smallest objective sets their pace."""
        return min(MAX_CONSTANT_SHARE, self._state.cost_tangent(smallest_s)[0] / smallest_s)

    def _prefill_time(self, seconds: float) -> float:
        """Return how many of the next `seconds` prompts get."""
        if seconds <= 0:
            return 0.0
        if self._smallest_s == inf:
            p, full_s = self._params, self._full_s
            leftover = self._state.unpromised
            leftover_s = p.row_s * len(leftover) + p.context_s * sum([len(t.tokens) for t in leftover.values()])
            return seconds * full_s / (full_s + (p.step_s + p.experts_s(inf)) + leftover_s)
        left_s = self._usable_share * seconds - self._demand.taken_s(seconds, self._params)
        return max(left_s, MIN_PREFILL_SHARE * seconds)

    def _walk(self, entries: list[Entry], limit: float) -> None:
        """Admit from the head until a request does not fit; reject those that can no longer be in time."""
        self._limit = limit
        for track in self._first_of(entries):
            if track.request.request_id in self.rejections:
                continue
            state = self._state
            self._is_new = track.forecast is None
            if self._is_new:
                track.forecast = self._forecast(track)
            if state.unattainable(track) and rejectable(track.request):
                reason = "tpot" if track.tpot_s < state.alone_s(track) else "e2e"
                self._reject(track, reason, state.prefill_s(len(track.tokens)))
                continue
            if self._seats <= 0:
                self._keep_queued(track, Cause.SEATS)
                continue
            if state.gives_up_pace(track) and rejectable(track.request) and (self._view.running or self.admitted):
                self._keep_queued(track, Cause.UTILISATION)  # its pace would be given up as soon as it started
                continue
            prompt = self._prompt_in_time(track)
            if prompt is None:
                continue
            verdict = self._verdict(track, prompt, limit)
            if verdict is Verdict.STOP:
                return
            if verdict is Verdict.ADMIT:
                self._admit(track, prompt)

    def _first_of(self, entries: list[Entry]) -> Iterator[Track]:
        """Iterate over the first entries that could start, each followed by the samples that start with it."""
        return first_of(entries, self._view.can_start, self._siblings, self._tuning.looked_at)

    def _siblings(self, lead: Track) -> Iterator[Track]:
        waiting = self._state.ledger.waiting
        return (waiting[request.request_id] for request in self._view.members(lead.request)[1:])

    def _walk_rest(self) -> None:
        """Admit requests without objectives, the oldest first, until `_rest_lacks` something."""
        taken = {track.request.request_id for track, _ in self.admitted}
        for track in self._first_of(self._state.backlog.rest):
            if track.request.request_id in taken:
                continue
            lacks = self._rest_lacks(track)
            if lacks is not None:
                self.default_cause = self.default_cause or lacks
                return
            self._growth += track.length
            self._admit(track, self._view.uncached(track.request))

    def _rest_lacks(self, track: Track) -> Cause | None:
        """Return what a request without objectives lacks: time, a spare seat, or KV blocks; None if nothing."""
        spare = 0.0
        if self._smallest_s < inf:
            if not self._demand.fits(self._tuning.roomy, self._usable_share, self._params):
                return Cause.UTILISATION
            spare = self._tuning.spare_seats * self._state.seats
        if self._seats <= spare:
            return Cause.SEATS
        return Cause.BLOCKS if self._reserved or not self._has_blocks(track) else None

    def _start_aged(self) -> None:
        """Start the oldest request without objectives before all others if it has waited long, from `rest_again_s` on.
        If it cannot start yet, its seat and KV blocks are reserved. Otherwise other requests would take everything that
        becomes free.
        """
        tuning = self._tuning
        track = next(self._first_of(self._state.backlog.rest), None)
        if track is None or self._now_s < self._state.rest_again_s:
            return
        if self._now_s < track.request.arrival_s + tuning.ageing_s:
            return
        fits = self._seats > 0 and self._has_blocks(track)
        self._growth += track.length
        self._admit(track, self._view.uncached(track.request))
        if not fits:
            self._reserved.append(self.admitted.pop()[0])

    def _admit(self, track: Track, prompt: int) -> None:
        self._seats -= 1
        self._blocks -= -(-len(track.tokens) // self._view.block_size)
        self.admitted.append((track, prompt))

    def _prompt_in_time(self, track: Track) -> int | None:
        """Return the prompt tokens to compute, or None if the request cannot start now. It is rejected if its first
        token would be late, and waits if it would make a started prompt late.
        """
        ends_s = self._state.chunk_ends_s
        left_s = track.due_s - self._now_s - ends_s
        ahead_s = self._ahead_s(track)
        time_s = self._prefill_time(left_s) - ahead_s if left_s < inf else inf
        prompt = len(track.tokens)
        own_s = self._own_s(track, prompt)
        if own_s > time_s:
            prompt = self._view.uncached(track.request)
            own_s, load_s = self._own_s(track, prompt), self._view.load_s(track.request)
            if own_s > self._prefill_time(left_s - load_s) - ahead_s and rejectable(track.request):
                if self._is_new:
                    track.waits_for = None
                wait_s = load_s + (ahead_s + own_s) / self._prefill_time(1.0) + self._params.step_s
                self._reject(track, track.first_objective, wait_s)
                return None
        for due_s, seconds in self._prompt_queue:
            if due_s > track.due_s:
                ahead_s += seconds
                time_s = self._prefill_time(due_s - self._now_s - ends_s)
                if ahead_s <= time_s < ahead_s + own_s:
                    self._keep_queued(track, Cause.QUEUE)
                    return None
        return prompt

    def _too_late_for(self, track: Track) -> Cause:
        """Return the cause of a rejection before any wait: without it the request would have been in time. It is one of
        earlier prompts, the step that ran at its arrival, its transit, or the running requests.
        """
        waited_s = self._now_s - track.request.arrival_s
        ends_s = self._state.chunk_ends_s
        busy = self._view.running or self.admitted
        if busy and waited_s > 2 * ends_s:  # it was never considered
            return self.default_cause or Cause.QUEUE
        left_s = track.due_s - self._now_s - ends_s
        ahead_s = self._ahead_s(track)
        own_s = self._own_s(track, track.count_uncached(self._view.uncached))
        if not self._fits(track):
            return Cause.UTILISATION
        if own_s <= self._prefill_time(left_s):
            return Cause.QUEUE
        if own_s > self._prefill_time(left_s + waited_s) - ahead_s:
            constant_s = self._params.step_s + self._params.experts_s(inf)
            alone = own_s * (self._full_s + constant_s) <= (left_s + waited_s) * self._full_s
            return Cause.UTILISATION if alone else Cause.IDLE
        return Cause.STEP if self._view.running else Cause.TRANSIT

    def _verdict(self, track: Track, prompt: int, limit: float) -> Verdict:
        """Decide whether a request starts: it and all running requests must be expected to meet their token deadlines.
        A request that is neither urgent nor cheap must leave a reserve for those that are, and these may overtake it. A
        request that fails only for its own pace may be overtaken by requests with a slower one.
        """
        state, room = self._state, self._has_blocks(track)
        yielding = [] if room else self._could_yield(track)
        if not room and not yielding:
            # Requests that need fewer blocks may overtake it, unless it has already run.
            return self._keep_queued(track, Cause.BLOCKS, Verdict.STOP if track.request.has_run else Verdict.SKIP)
        own_s = self._own_s(track, prompt)
        demand, smallest_s = self._demand, min(self._smallest_s, track.tpot_s)
        idle = not self._view.running and not self.admitted
        if smallest_s < inf and not track.request.has_run and not idle:
            usable, p = state.usable_share(smallest_s), self._params
            share = usable - self._overhead(smallest_s)
            spare = URGENT_RESERVE_SHARE if state.price.load else 0.0
            if (
                track.can_wait
                and state.price.overloaded
                and state.can_wait_weight + track.weight + state.price.load > MAX_CAN_WAIT_SHARE * (share - spare)
            ):
                return self._keep_queued(track, Cause.UTILISATION)
            full = Verdict.STOP if smallest_s == self._smallest_s else Verdict.SKIP
            if not demand.fits(limit, usable, p, track.weight):
                return self._keep_queued(track, Cause.UTILISATION, full)
            unreserved = limit - self._reserve(track, smallest_s)
            if not demand.fits(unreserved, usable, p, track.weight):
                return self._keep_queued(track, Cause.UTILISATION)
            demand = state.demand_with(demand, track, own_s, self._now_s)
            if not demand.fits(unreserved, usable, p):
                fits = demand.fits(limit, usable, p)
                return self._keep_queued(track, Cause.UTILISATION, Verdict.SKIP if fits else full)
        else:
            demand = state.demand_with(demand, track, own_s, self._now_s)
        if yielding:  # it starts when the blocks are free, and no other request takes them meanwhile
            self.yields += yielding
            return self._keep_queued(track, Cause.BLOCKS, Verdict.STOP)
        self._demand, self._smallest_s = demand, smallest_s
        self._growth += track.length
        self._beside += prompt
        insort(self._prompt_queue, (track.due_s, own_s))
        return Verdict.ADMIT

    def _has_blocks(self, track: Track) -> bool:
        """True if its prompt fits the KV cache now, and its and the running requests' expected peak fits too."""
        size, context = self._view.block_size, len(track.tokens)
        if -(-context // size) > self._blocks:
            return False
        if not self._view.running or self._growth + context + track.length <= self._blocks * size:
            return True
        state = self._state
        rows = [*zip(self._context, state.left(self._context), strict=True)]
        preempted = [other for other in state.preempted.values() if other is not track]
        rows += [(len(other.tokens), max(0.0, other.length - other.outputs)) for other in preempted]
        starting = [*state.ledger.filling.values(), *(new for new, _ in self.admitted), *self._reserved, track]
        rows += [(len(other.tokens), other.length) for other in starting]
        if not track.is_promised:  # for a promised request these would be preempted
            rows += [(len(other.tokens), 0.0) for other in state.unpromised.values()]
        held = sum([request.planned for request in self._view.running])
        return peak_tokens(rows) <= self._view.free_blocks * size + held

    def _could_yield(self, track: Track) -> list[Request]:
        """Return unpromised requests whose KV blocks suffice for the prompt of this one; none if there are too few. No
        request is preempted twice for this, or a long one would compute its prompt again and again.
        """
        size, chosen = self._view.block_size, []
        lacking = -(-len(track.tokens) // size) - self._blocks
        if lacking <= 0:
            return []
        for other in reversed(self._state.unpromised.values()):
            request = other.request
            if (other.is_demoted or request.slo is None) and not request.preemptions and request not in self.yields:
                chosen.append(request)
                lacking -= request.planned // size
            if lacking <= 0:
                return chosen
        return []

    def _reserve(self, track: Track, smallest_s: float) -> float:
        tuning, mean_s = self._tuning, self._state.price.mean_s
        left = min(1.0, max(0.0, track.due_s - self._now_s - smallest_s) / (tuning.patience * smallest_s))
        return tuning.reserve * left * (min(2.0, track.price_s / mean_s) if mean_s else 1.0)
