"""Who of the waiting starts under the slack policy, who waits, and who is turned away."""

from bisect import insort
from collections.abc import Iterator, Sequence
from math import inf

from roseinfer.core.request import Request
from roseinfer.core.slo import Cause, Forecast, Rejection
from roseinfer.sched.lengths.estimators import peak_tokens
from roseinfer.sched.policies.common.ledger import Track
from roseinfer.sched.policies.slack.attainable import Chances
from roseinfer.sched.policies.slack.backlog import Entry, first_of
from roseinfer.sched.policies.slack.capacity import MOST_CONSTANT, PRICED
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policy import RejectedRequest, Verdict, View, rejectable

LEAST_PREFILL_SHARE = 0.13  # of the machine, for judging whether a prompt can be in time
ROOMY_FOR_PATIENT = 0.9
RATHER = (*PRICED, Cause.UTILISATION)  # what is named rather than others that hold as well
SPARE_FOR_HASTY = 0.15  # of the machine, which requests that can wait leave free while not all can be served


class SlackAdmission:
    """One step's. `admitted`: with the prompt tokens of each; they start as far as the step has tokens for them.
    `line`: what the others wait for, of whom nothing is said; None if nobody had to wait.
    """

    def __init__(self, state: SlackState, view: View, now_s: float) -> None:
        self.admitted: list[tuple[Track, int]] = []
        self.rejections: dict[str, RejectedRequest] = {}
        self.yields: list[Request] = []
        self.line: Cause | None = None
        self._limit = 1.0  # of those that are looked at
        self._is_new = False  # the one that is looked at
        self._state = state
        self._tuning = state.tuning
        self._params = state.cost.params
        self._view = view
        self._now_s = now_s
        self._kept: list[Track] = []  # cannot start yet, but what they need is not given to others

    def run(self, slacks: Sequence[float], context: Sequence[int]) -> None:
        """In order while demand fits; then what is too expensive, if there is room to spare.

        `slacks`, `context`: seconds and tokens of the requests in the batch.
        """
        state, view = self._state, self._view
        for track in state.hopeless(view, self._now_s):
            self._reject(track, track.first_objective, state.prefill_s(len(track.tokens)))
        if not state.ledger.waiting:
            return
        self._context, self._slacks = context, slacks
        self._seats = min(view.free_seats, state.seats - len(view.running))
        self._blocks = view.free_blocks
        self._smallest_s = min([track.tpot_s for track in state.ledger.filling.values()], default=inf)
        if len(state.batch):
            self._smallest_s = min(self._smallest_s, state.batch.smallest_s)
        self._keep = state.keep(self._smallest_s)
        self._closely = state.price.update(self._now_s, self._keep, state.line)
        if self._closely:
            state.backlog.sort_by_price(state.worth)
        state.refresh_demand(self._now_s, slacks, context, self._smallest_s)
        self._demand, self._growth, self._beside = state.demand, state.growth, state.beside
        self._line = sorted([(t.due_s, state.to_fill_s(t)) for t in state.ledger.filling.values() if t.owed])
        self._start_aged()
        self._walk(state.backlog.affordable, 1.0)
        self._walk(state.backlog.parked, self._tuning.roomy)
        self._walk_rest()
        if self.rejections:
            self._say_what_could_be()

    def _say_what_could_be(self) -> None:
        """Of those turned away, behind those that start; and why, if they have not waited for anything."""
        self._limit = 1.0
        chances = Chances(
            self._state,
            self._now_s,
            self._demand,
            self._smallest_s,
            sum([seconds for _, seconds in self._line]),
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
        if self._state.worth(track):
            self._state.price.decided(refused=True)
        rejection = Rejection(reason, predicted_s, cause)
        self.rejections[track.request.request_id] = RejectedRequest(track.request, rejection)

    def _hold(self, track: Track, cause: Cause, verdict: Verdict = Verdict.SKIP) -> Verdict:
        """It waits: for those that run if they would keep it from starting as well, since these have what it lacks; and
        not for them but for its price, if without that it were none of those that wait for room to spare.

        Whether they would is asked now and then: it costs as much as deciding.
        """
        known = track.waits_for
        if self._closely or cause is Cause.QUEUE or (known is not cause and known not in RATHER):
            self._think(track, cause)
        if self._limit == 1.0:
            self.line = track.waits_for
        return verdict

    def _think(self, track: Track, cause: Cause) -> None:
        if cause is not Cause.UTILISATION and not self._fits(track):
            cause = Cause.UTILISATION
        elif cause is Cause.QUEUE and (self._closely or track.waits_for is not cause) and not self._has_blocks(track):
            cause = Cause.BLOCKS  # which it will lack for longer
        if cause is Cause.UTILISATION and self._limit < 1.0:
            cause = self._state.objection(track) or cause
        self._state.name(track, cause)

    def _fits(self, track: Track) -> bool:
        """Whether there is time for its tokens beside those that run."""
        smallest_s = min(self._smallest_s, track.tpot_s)
        if smallest_s == inf or track.request.has_run or not (self._view.running or self.admitted):
            return True
        return self._demand.fits(self._limit, self._state.keep(smallest_s), self._params, track.weight)

    def _own_s(self, track: Track, prompt: int) -> float:
        """What the last `prompt` tokens that are known of one take, beside what a step has anyway: other prompts, where
        no row keeps steps short.
        """
        beside = self._beside if self._smallest_s < inf else inf
        return self._params.prefill_s(len(track.tokens) - prompt, prompt, beside)

    def _ahead_s(self, track: Track) -> float:
        """What the prompts that have started take and are due no later than this one's."""
        return sum([seconds for due_s, seconds in self._line if due_s <= track.due_s])

    def _forecast(self, track: Track) -> Forecast:
        """What is expected of one that is looked at for the first time: of its first token, if it starts now."""
        p, waited_s = self._params, self._now_s - track.request.arrival_s + self._view.load_s(track.request)
        ahead_s = self._ahead_s(track)
        own_s = self._own_s(track, track.count_uncached(self._view.uncached))
        pace_s = max(self._state.alone_s(track), min(track.tpot_s, self._state.recent_step_s))
        return Forecast(waited_s + (ahead_s + own_s) / self._prefill_time(1.0) + p.step_s, pace_s)

    @property
    def _full_s(self) -> float:
        """What the tokens of a step take that holds prompts and nothing else."""
        return self._params.prefill_s(0, self._view.token_budget, inf)

    def _overhead(self, smallest_s: float) -> float:
        """Share of the time that steps cost whatever they hold, if the smallest objective sets their pace."""
        return min(MOST_CONSTANT, self._state.line(smallest_s)[0] / smallest_s)

    def _prefill_time(self, seconds: float) -> float:
        """Of the next `seconds`, those that are there for prompts."""
        if seconds <= 0:
            return 0.0
        if self._smallest_s == inf:
            p, full_s = self._params, self._full_s
            leftover = self._state.leftover
            leftover_s = p.row_s * len(leftover) + p.context_s * sum([len(t.tokens) for t in leftover.values()])
            return seconds * full_s / (full_s + (p.step_s + p.experts_s(inf)) + leftover_s)
        left_s = self._keep * seconds - self._demand.taken_s(seconds, self._params)
        return max(left_s, LEAST_PREFILL_SHARE * seconds)

    def _walk(self, entries: list[Entry], limit: float) -> None:
        """Admit from the head until one does not fit; those that cannot be in time any more are turned away."""
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
                self._hold(track, Cause.SEATS)
                continue
            if state.gives_up(track) and rejectable(track.request) and (self._view.running or self.admitted):
                self._hold(track, Cause.UTILISATION)  # else it would start to be given up at once
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
        """The first that could start, each followed by the samples of the same request that could start with it."""
        return first_of(entries, self._view.can_start, self._siblings, self._tuning.looked_at)

    def _siblings(self, lead: Track) -> Iterator[Track]:
        waiting = self._state.ledger.waiting
        return (waiting[request.request_id] for request in self._view.members(lead.request)[1:])

    def _walk_rest(self) -> None:
        """Those without objectives, the oldest first, as far as `_has_room`."""
        taken = {track.request.request_id for track, _ in self.admitted}
        for track in self._first_of(self._state.backlog.rest):
            if track.request.request_id in taken:
                continue
            lacks = self._rest_lacks(track)
            if lacks is not None:
                self.line = self.line or lacks
                return
            self._growth += track.length
            self._admit(track, self._view.uncached(track.request))

    def _rest_lacks(self, track: Track) -> Cause | None:
        """What the others do not leave for one without objectives: time, a seat to spare, or KV blocks."""
        spare = 0.0
        if self._smallest_s < inf:
            if not self._demand.fits(self._tuning.roomy, self._keep, self._params):
                return Cause.UTILISATION
            spare = self._tuning.spare_seats * self._state.seats
        if self._seats <= spare:
            return Cause.SEATS
        return Cause.BLOCKS if self._kept or not self._has_blocks(track) else None

    def _start_aged(self) -> None:
        """The oldest without objectives that has waited long starts before all others, from `rest_again_s` on.

        If it cannot yet, a seat and the KV blocks that it needs are kept for it. Otherwise others take all that comes
        free for as long as there are any.
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
            self._kept.append(self.admitted.pop()[0])

    def _admit(self, track: Track, prompt: int) -> None:
        self._seats -= 1
        self._blocks -= -(-len(track.tokens) // self._view.block_size)
        self.admitted.append((track, prompt))

    def _prompt_in_time(self, track: Track) -> int | None:
        """The prompt tokens to compute; None if that takes too long now (the request is turned away), or would make
        another prompt late that has started.
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
        for due_s, seconds in self._line:
            if due_s > track.due_s:
                ahead_s += seconds
                time_s = self._prefill_time(due_s - self._now_s - ends_s)
                if ahead_s <= time_s < ahead_s + own_s:
                    self._hold(track, Cause.QUEUE)
                    return None
        return prompt

    def _too_late_for(self, track: Track) -> Cause:
        """What one could have been in time without that was turned away before it waited for anything: the prompts
        before its own, the step that ran when it came, the way to here, or those that run.
        """
        waited_s = self._now_s - track.request.arrival_s
        ends_s = self._state.chunk_ends_s
        busy = self._view.running or self.admitted
        if busy and waited_s > 2 * ends_s:  # nobody got to it
            return self.line or Cause.QUEUE
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
        """Whether all that run, and this one, can keep their token deadlines, as far as one can see.

        One that is neither urgent nor cheap must leave a reserve for those that are, and may be overtaken by them, and
        one that fails for its own pace alone by those that need a slower one.
        """
        state, room = self._state, self._has_blocks(track)
        yielding = [] if room else self._could_yield(track)
        if not room and not yielding:
            # Who needs fewer may pass, except one that has begun already.
            return self._hold(track, Cause.BLOCKS, Verdict.STOP if track.request.has_run else Verdict.SKIP)
        own_s = self._own_s(track, prompt)
        demand, smallest_s = self._demand, min(self._smallest_s, track.tpot_s)
        idle = not self._view.running and not self.admitted
        if smallest_s < inf and not track.request.has_run and not idle:
            keep, p = state.keep(smallest_s), self._params
            share = keep - self._overhead(smallest_s)
            spare = SPARE_FOR_HASTY if state.price.load else 0.0
            if (
                track.patient
                and state.price.crowded
                and state.patient + track.weight + state.price.load > ROOMY_FOR_PATIENT * (share - spare)
            ):
                return self._hold(track, Cause.UTILISATION)
            full = Verdict.STOP if smallest_s == self._smallest_s else Verdict.SKIP
            if not demand.fits(limit, keep, p, track.weight):
                return self._hold(track, Cause.UTILISATION, full)
            unreserved = limit - self._reserve(track, smallest_s)
            if not demand.fits(unreserved, keep, p, track.weight):
                return self._hold(track, Cause.UTILISATION)
            demand = state.demand_with(demand, track, own_s, self._now_s)
            if not demand.fits(unreserved, keep, p):
                fits = demand.fits(limit, keep, p)
                return self._hold(track, Cause.UTILISATION, Verdict.SKIP if fits else full)
        else:
            demand = state.demand_with(demand, track, own_s, self._now_s)
        if yielding:  # it starts when the blocks are there, and nobody takes them meanwhile
            self.yields += yielding
            return self._hold(track, Cause.BLOCKS, Verdict.STOP)
        self._demand, self._smallest_s = demand, smallest_s
        self._growth += track.length
        self._beside += prompt
        insort(self._line, (track.due_s, own_s))
        return Verdict.ADMIT

    def _has_blocks(self, track: Track) -> bool:
        """Whether its prompt fits the KV cache now, and all that run and this one at their expected peak."""
        size, context = self._view.block_size, len(track.tokens)
        if -(-context // size) > self._blocks:
            return False
        if not self._view.running or self._growth + context + track.length <= self._blocks * size:
            return True
        state = self._state
        rows = [*zip(self._context, state.left(self._context), strict=True)]
        preempted = [other for other in state.preempted.values() if other is not track]
        rows += [(len(other.tokens), max(0.0, other.length - other.outputs)) for other in preempted]
        starting = [*state.ledger.filling.values(), *(admitted for admitted, _ in self.admitted), *self._kept, track]
        rows += [(len(other.tokens), other.length) for other in starting]
        if not track.owed:  # else they make room
            rows += [(len(other.tokens), 0.0) for other in state.leftover.values()]
        held = sum([request.planned for request in self._view.running])
        return peak_tokens(rows) <= self._view.free_blocks * size + held

    def _could_yield(self, track: Track) -> list[Request]:
        """Requests that are owed nothing, and whose KV blocks are what the prompt of this one lacks; none if there are
        not enough. None yields twice, or a long one would compute its prompt again and again.
        """
        size, chosen = self._view.block_size, []
        lacking = -(-len(track.tokens) // size) - self._blocks
        if lacking <= 0:
            return []
        for other in reversed(self._state.leftover.values()):
            request = other.request
            if (other.doomed or request.slo is None) and not request.preemptions and request not in self.yields:
                chosen.append(request)
                lacking -= request.planned // size
            if lacking <= 0:
                return chosen
        return []

    def _reserve(self, track: Track, smallest_s: float) -> float:
        tuning, mean_s = self._tuning, self._state.price.mean_s
        left = min(1.0, max(0.0, track.due_s - self._now_s - smallest_s) / (tuning.patience * smallest_s))
        return tuning.reserve * left * (min(2.0, track.price_s / mean_s) if mean_s else 1.0)
