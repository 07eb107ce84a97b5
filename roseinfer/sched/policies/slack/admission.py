"""Admission of the slack policy: which waiting requests start, which wait, and which are rejected.

Requests are considered in order. One that can no longer have its first token in time is rejected. Otherwise `RULES` are
asked, and it starts if none objects; else the first objection is what it waits for.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from roseinfer.core.request import Request
from roseinfer.core.slo import Cause, Forecast, Rejection
from roseinfer.sched.lengths.estimators import peak_tokens
from roseinfer.sched.policies.slack import deadlines
from roseinfer.sched.policies.slack.demand import MAX_CONSTANT_SHARE, Demand
from roseinfer.sched.policies.slack.requests import Entry, SlackTrack, first_of
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policy import RejectedRequest, View, rejectable

MIN_PREFILL_SHARE = 0.13  # of the machine, for prompts
MAX_CAN_WAIT_SHARE = 0.9  # of the usable machine, for requests that can wait, under overload
URGENT_RESERVE_SHARE = 0.15  # of the machine, which they leave free under overload


class WaitingCandidate(NamedTuple):
    """Waiting request that is considered. `prompt`: tokens to compute, in `own_s` seconds. `smallest_s`: tightest TPOT
    objective if it runs. `price`: why it is not worth its cost at present, None if it is.
    """

    track: SlackTrack
    prompt: int
    own_s: float
    smallest_s: float
    price: Cause | None


class StepAdmission:
    """Admission in one step: the machine after all starts so far. `admitted`: requests with their prompt tokens, which
    start while the step has tokens. `yields`: running requests that give their KV blocks up. `default_cause`: cause of
    all requests that are not named; None if none had to wait.
    """

    def __init__(self, state: SlackState, view: View, now_s: float) -> None:
        self.state = state
        self.view = view
        self.now_s = now_s
        self.admitted: list[tuple[SlackTrack, int]] = []
        self.rejections: dict[str, RejectedRequest] = {}
        self.yields: list[Request] = []
        self.default_cause: Cause | None = None
        self.seats = min(view.free_seats, state.seats - len(view.running))
        self.blocks = view.free_blocks
        self.smallest_s = min([track.tpot_s for track in state.ledger.filling.values()], default=inf)
        self.smallest_s = min(self.smallest_s, state.batch.smallest_s)
        self.demand, self.growth, self.beside = state.demand, state.growth, state.beside
        filling = state.ledger.filling.values()
        self.prompts = sorted([(t.due_s, state.to_fill_s(t)) for t in filling if t.is_promised])
        self._demand_with: tuple[WaitingCandidate, Demand] | None = None
        self.reserved: list[SlackTrack] = []  # cannot start yet, but hold a reservation

    def run(self) -> None:
        state = self.state
        for track in deadlines.unreachable(state, self.view, self.now_s):
            self._reject(track, track.first_objective, state.prefill_s(len(track.tokens)))
        if not state.ledger.waiting:
            return
        self._start_aged()
        self._walk(state.backlog.affordable)
        self._walk(state.backlog.parked)
        self._walk_rest()

    @property
    def idle(self) -> bool:
        """True if no request runs or starts."""
        return not self.view.running and not self.admitted

    # --- the walk -----------------------------------------------------------------------------------------------
    def _walk(self, entries: list[Entry]) -> None:
        """Admit from the head until a request does not fit; reject those that can no longer be in time."""
        for track in self._first_of(entries):
            if track.request.request_id in self.rejections:
                continue
            is_new = track.forecast is None
            if is_new:
                track.forecast = self._forecast(track)
            candidate = self.candidate(track)
            if self._is_hopeless(candidate, is_new):
                continue
            objection = self.objection(candidate)
            if objection is None:
                self._start(candidate)
                continue
            rule, cause = objection
            self.state.set_cause(track, cause)
            if rule is kv_blocks and not time_for_prompt(self, candidate):
                self.yields += _could_yield(self, track)
            if candidate.price is None:
                self.default_cause = cause
            if self._blocks_others(candidate, rule):
                return

    def candidate(self, track: SlackTrack) -> WaitingCandidate:
        prompt = track.count_uncached(self.view.uncached)
        smallest_s = min(self.smallest_s, track.tpot_s)
        return WaitingCandidate(track, prompt, self.own_s(track, prompt), smallest_s, self.state.objection(track))

    def objection(self, candidate: WaitingCandidate) -> "tuple[Rule, Cause] | None":
        """Return the first of `RULES` that objects and its cause, None if it can start."""
        for rule in RULES:
            cause = rule(self, candidate)
            if cause is not None:
                return rule, candidate.price or cause if cause is Cause.UTILISATION else cause
        return None

    def _blocks_others(self, candidate: WaitingCandidate, rule: "Rule") -> bool:
        """True if no later request may overtake it: it lacks time for any pace, or has run before and lacks blocks."""
        if rule is kv_blocks:
            return candidate.track.request.has_run or bool(self.yields)
        return rule in IN_TURN and candidate.smallest_s == self.smallest_s

    def _start(self, candidate: WaitingCandidate) -> None:
        track, prompt, own_s, smallest_s, _ = candidate
        self.demand = self.demand_with(candidate)
        self.smallest_s = smallest_s
        self.beside += prompt
        insort(self.prompts, (track.due_s, own_s))
        self._admit(track)

    def _admit(self, track: SlackTrack) -> None:
        self.seats -= 1
        self.blocks -= self.blocks_of(track)
        self.growth += track.length
        self.admitted.append((track, self.view.uncached(track.request)))

    def blocks_of(self, track: SlackTrack) -> int:
        """Return the KV blocks of its known tokens."""
        return -(-len(track.tokens) // self.view.block_size)

    def _first_of(self, entries: list[Entry]) -> Iterator[SlackTrack]:
        """Iterate over the first entries that could start, each followed by the samples that start with it."""
        return first_of(entries, self.view.can_start, self._siblings, self.state.tuning.looked_at)

    def _siblings(self, lead: SlackTrack) -> Iterator[SlackTrack]:
        waiting = self.state.ledger.waiting
        return (waiting[request.request_id] for request in self.view.members(lead.request)[1:])

    # --- time of prompts ----------------------------------------------------------------------------------------
    def own_s(self, track: SlackTrack, prompt: int) -> float:
        """Return the time of a request's last `prompt` tokens, in a step with the other tokens that it has anyway.
        Without decoding rows that limit it, a step is full of prompts.
        """
        beside = self.beside if self.smallest_s < inf else inf
        return self.state.cost.params.prefill_s(len(track.tokens) - prompt, prompt, beside)

    def ahead_s(self, track: SlackTrack) -> float:
        """Return the time of the started prompts that are due no later than this one."""
        return sum([seconds for due_s, seconds in self.prompts if due_s <= track.due_s])

    def prefill_time(self, seconds: float) -> float:
        """Return how many of the next `seconds` prompts get."""
        if seconds <= 0 or seconds == inf:
            return max(0.0, seconds)
        if self.smallest_s == inf:
            p, full_s = self.state.cost.params, self.full_s
            leftover = self.state.unpromised
            leftover_s = p.row_s * len(leftover) + p.context_s * sum([len(t.tokens) for t in leftover.values()])
            return seconds * full_s / (full_s + (p.step_s + p.experts_s(inf)) + leftover_s)
        usable_share = self.state.usable_share(self.smallest_s)
        left_s = usable_share * seconds - self.demand.taken_s(seconds, self.state.cost.params)
        return max(left_s, MIN_PREFILL_SHARE * seconds)

    @property
    def full_s(self) -> float:
        """Time of the tokens of a step full of prompts."""
        return self.state.cost.params.prefill_s(0, self.view.token_budget, inf)

    def demand_with(self, candidate: WaitingCandidate) -> Demand:
        """Return the demand if it starts."""
        if self._demand_with is None or self._demand_with[0] is not candidate:
            track, demand = candidate.track, self.demand
            if track.is_promised:
                due_s = min(track.due_s - self.now_s, self.state.tuning.ageing_s)
                demand = demand.with_one(track.weight, track.tpot_s, candidate.own_s, due_s)
            self._demand_with = candidate, demand
        return self._demand_with[1]

    def left_s(self, track: SlackTrack) -> float:
        """Return the time from now until the step of its last prompt tokens has to begin."""
        return track.due_s - self.now_s - self.state.chunk_ends_s

    def is_late(self, candidate: WaitingCandidate) -> bool:
        """True if its first token would be late, although it starts now."""
        track = candidate.track
        left_s = self.left_s(track) - self.view.load_s(track.request)
        return candidate.own_s > self.prefill_time(left_s) - self.ahead_s(track)

    def _forecast(self, track: SlackTrack) -> Forecast:
        """Predict first token and pace of a request that is considered for the first time, if it starts now."""
        state, waited_s = self.state, self.now_s - track.request.arrival_s + self.view.load_s(track.request)
        own_s = self.own_s(track, track.count_uncached(self.view.uncached))
        pace_s = max(state.alone_s(track), min(track.tpot_s, state.recent_step_s))
        first_s = (self.ahead_s(track) + own_s) / self.prefill_time(1.0) + state.cost.params.step_s
        return Forecast(waited_s + first_s, pace_s)

    # --- rejections ---------------------------------------------------------------------------------------------
    def _is_hopeless(self, candidate: WaitingCandidate, is_new: bool) -> bool:
        """Reject a request if it cannot be in time whatever happens, and return True."""
        state, track = self.state, candidate.track
        if track.request.has_run or not rejectable(track.request):
            return False
        if deadlines.unattainable(state, track):
            reason = "tpot" if track.tpot_s < state.alone_s(track) else "e2e"
            self._reject(track, reason, state.prefill_s(len(track.tokens)))
            return True
        if not self.is_late(candidate):
            return False
        if is_new:
            track.waits_for = None
        ahead_s = self.ahead_s(track) + candidate.own_s
        wait_s = self.view.load_s(track.request) + ahead_s / self.prefill_time(1.0) + state.cost.params.step_s
        self._reject(track, track.first_objective, wait_s)
        return True

    def _reject(self, track: SlackTrack, reason: str, wait_s: float) -> None:
        track.count_uncached(self.view.uncached)
        cause = Cause.IDLE if deadlines.misses_alone(self.state, track) else track.waits_for or self._late_for(track)
        rejection = Rejection(reason, self.now_s - track.request.arrival_s + wait_s, cause)
        self.rejections[track.request.request_id] = RejectedRequest(track.request, rejection)

    def _late_for(self, track: SlackTrack) -> Cause:
        """Return the cause of a rejection before any wait: without it the request would have been in time. It is one of
        earlier prompts, the step that ran at its arrival, its transit, or the running requests.
        """
        waited_s, left_s = self.now_s - track.request.arrival_s, self.left_s(track)
        if not self.idle and waited_s > 2 * self.state.chunk_ends_s:  # it was never considered
            return self.default_cause or Cause.QUEUE
        candidate = self.candidate(track)
        if time_for_tokens(self, candidate):
            return Cause.UTILISATION
        if candidate.own_s <= self.prefill_time(left_s):
            return Cause.QUEUE
        if candidate.own_s > self.prefill_time(left_s + waited_s) - self.ahead_s(track):
            p = self.state.cost.params
            alone = candidate.own_s * (self.full_s + p.step_s + p.experts_s(inf)) <= (left_s + waited_s) * self.full_s
            return Cause.UTILISATION if alone else Cause.IDLE
        return Cause.STEP if self.view.running else Cause.TRANSIT

    # --- requests without objectives ----------------------------------------------------------------------------
    def _walk_rest(self) -> None:
        """Admit requests without objectives, the oldest first, until they lack something."""
        taken = {track.request.request_id for track, _ in self.admitted}
        for track in self._first_of(self.state.backlog.rest):
            if track.request.request_id in taken:
                continue
            lacks = self._rest_lacks(track)
            if lacks is not None:
                self.default_cause = self.default_cause or lacks
                return
            self._admit(track)

    def _rest_lacks(self, track: SlackTrack) -> Cause | None:
        """Return what a request without objectives lacks: time, a spare seat, or KV blocks; None if nothing."""
        tuning, spare = self.state.tuning, 0.0
        if self.smallest_s < inf:
            usable_share = self.state.usable_share(self.smallest_s)
            if not self.demand.fits(tuning.roomy, usable_share, self.state.cost.params):
                return Cause.UTILISATION
            spare = tuning.spare_seats * self.state.seats
        if self.seats <= spare:
            return Cause.SEATS
        return Cause.BLOCKS if self.reserved or not has_blocks(self, track) else None

    def _start_aged(self) -> None:
        """Start the oldest request without objectives before all others if it has waited long, from `rest_again_s` on.
        If it cannot start yet, its seat and KV blocks are reserved. Otherwise other requests would take everything that
        becomes free.
        """
        track = next(self._first_of(self.state.backlog.rest), None)
        if track is None or self.now_s < self.state.rest_again_s:
            return
        if self.now_s < track.request.arrival_s + self.state.tuning.ageing_s:
            return
        fits = self.seats > 0 and has_blocks(self, track)
        self._admit(track)
        if not fits:
            self.reserved.append(self.admitted.pop()[0])


# --- rules: what a request lacks, None if nothing -------------------------------------------------------------------
def time_for_tokens(machine: StepAdmission, candidate: WaitingCandidate) -> Cause | None:
    """Demand time for its tokens and those of the running requests: of the whole machine, or only of its roomy part for
    a request above the price limit.
    """
    if _is_free(machine, candidate) or _fits(machine, candidate, machine.demand, candidate.track.weight):
        return None
    return Cause.UTILISATION


def room_for_urgent(machine: StepAdmission, candidate: WaitingCandidate) -> Cause | None:
    """Under overload, requests that can wait leave the machine to those that cannot, as many as have arrived."""
    state, track = machine.state, candidate.track
    if not (track.can_wait and state.price.overloaded) or _is_free(machine, candidate):
        return None
    constant = min(MAX_CONSTANT_SHARE, state.cost_tangent(candidate.smallest_s)[0] / candidate.smallest_s)
    usable_share = state.usable_share(candidate.smallest_s) - constant
    usable_share -= URGENT_RESERVE_SHARE if state.price.load else 0.0
    taken = state.can_wait_weight + track.weight + state.price.load
    return Cause.UTILISATION if taken > MAX_CAN_WAIT_SHARE * usable_share else None


def a_seat(machine: StepAdmission, candidate: WaitingCandidate) -> Cause | None:
    return Cause.SEATS if machine.seats <= 0 else None


def kv_blocks(machine: StepAdmission, candidate: WaitingCandidate) -> Cause | None:
    return None if has_blocks(machine, candidate.track) else Cause.BLOCKS


def others_first_tokens(machine: StepAdmission, candidate: WaitingCandidate) -> Cause | None:
    """Refuse to make a started prompt late that is due after it."""
    track, own_s = candidate.track, candidate.own_s
    ahead_s = machine.ahead_s(track)
    for due_s, seconds in machine.prompts:
        if due_s > track.due_s:
            ahead_s += seconds
            time_s = machine.prefill_time(due_s - machine.now_s - machine.state.chunk_ends_s)
            if ahead_s <= time_s < ahead_s + own_s:
                return Cause.QUEUE
    return None


def time_for_prompt(machine: StepAdmission, candidate: WaitingCandidate) -> Cause | None:
    """Demand time for its prompt as well."""
    return None if _prompt_fits(machine, candidate, 0.0) else Cause.UTILISATION


def a_reserve(machine: StepAdmission, candidate: WaitingCandidate) -> Cause | None:
    """A request that is neither urgent nor cheap must leave a reserve for those that are."""
    if _is_free(machine, candidate) or _prompt_fits(machine, candidate, _reserve(machine, candidate)):
        return None
    return Cause.UTILISATION


Rule = Callable[[StepAdmission, WaitingCandidate], Cause | None]
RULES: Sequence[Rule] = (
    room_for_urgent,
    time_for_tokens,
    a_seat,
    kv_blocks,
    others_first_tokens,
    time_for_prompt,
    a_reserve,
)
# No later request may overtake one that lacks this, unless it has a slower pace.
IN_TURN = (time_for_tokens, time_for_prompt)


def _prompt_fits(machine: StepAdmission, candidate: WaitingCandidate, reserve: float) -> bool:
    return _is_free(machine, candidate) or _fits(machine, candidate, machine.demand_with(candidate), 0.0, reserve)


def _is_free(machine: StepAdmission, candidate: WaitingCandidate) -> bool:
    """True if no pace limits it: none is needed, it has run before, or it is alone."""
    return candidate.smallest_s == inf or candidate.track.request.has_run or machine.idle


def _fits(
    machine: StepAdmission, candidate: WaitingCandidate, demand: Demand, weight: float, reserve: float = 0.0
) -> bool:
    limit = 1.0 if candidate.price is None else machine.state.tuning.roomy
    usable_share = machine.state.usable_share(candidate.smallest_s)
    return demand.fits(limit - reserve, usable_share, machine.state.cost.params, weight)


def _reserve(machine: StepAdmission, candidate: WaitingCandidate) -> float:
    tuning, mean_s, track = machine.state.tuning, machine.state.price.mean_s, candidate.track
    left_s = max(0.0, track.due_s - machine.now_s - candidate.smallest_s)
    left = min(1.0, left_s / (tuning.patience * candidate.smallest_s))
    return tuning.reserve * left * (min(2.0, track.price_s / mean_s) if mean_s else 1.0)


def has_blocks(machine: StepAdmission, track: SlackTrack) -> bool:
    """True if its prompt fits the KV cache now, and its and the running requests' expected peak fits too."""
    view, state, left = machine.view, machine.state, machine.state.lengths.left
    if machine.blocks_of(track) > machine.blocks:
        return False
    if not view.running or machine.growth + len(track.tokens) + track.length <= machine.blocks * view.block_size:
        return True
    rows = [(len(other.tokens), left(other.request, max(1, other.outputs))) for other in state.batch.tracks]
    again = [other for other in state.preempted.values() if other is not track]
    rows += [(len(other.tokens), max(0.0, other.length - other.outputs)) for other in again]
    starting = [*state.ledger.filling.values(), *(new for new, _ in machine.admitted), *machine.reserved, track]
    rows += [(len(other.tokens), other.length) for other in starting]
    if not track.is_promised:  # for a promised request these would be preempted
        rows += [(len(other.tokens), 0.0) for other in state.unpromised.values()]
    held = sum([request.planned for request in view.running])
    return peak_tokens(rows) <= view.free_blocks * view.block_size + held


def _could_yield(machine: StepAdmission, track: SlackTrack) -> list[Request]:
    """Return unpromised requests whose KV blocks suffice for the prompt of this one; none if there are too few. No
    request is preempted twice for this, or a long one would compute its prompt again and again.
    """
    size, chosen = machine.view.block_size, list[Request]()
    lacking = machine.blocks_of(track) - machine.blocks
    for other in reversed(machine.state.unpromised.values()):
        if lacking <= 0:
            break
        is_free = other.is_demoted or other.request.slo is None
        if is_free and not other.request.preemptions and other.request not in machine.yields:
            chosen.append(other.request)
            lacking -= other.request.planned // size
    return [] if lacking > 0 else chosen
