"""Admission of the slack policy: which waiting requests start, which wait, and which are rejected.

Requests are considered in order. One that can no longer have its first token in time is rejected. Otherwise the `rules`
are asked, and it starts if none objects; else the first objection is what it waits for.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf

from roseinfer.core.request import Request
from roseinfer.core.slo import Cause, Forecast, Rejection
from roseinfer.sched.policies.slack import deadlines, rules
from roseinfer.sched.policies.slack.machine import StepMachine, WaitingCandidate
from roseinfer.sched.policies.slack.requests import SlackTrack
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policies.slack.terms import AGEING_S, ROOMY_SHARE
from roseinfer.sched.policy import View, rejectable

SPARE_SEATS_SHARE = 0.125  # of seats, which requests without objectives leave free


class StepAdmission:
    """Admission in one step. `machine`: what is left, and which requests start. `yields`: running requests that give
    their KV blocks up. `default_cause`: cause of all requests that are not named; None if none had to wait.
    """

    def __init__(self, state: SlackState, view: View, now_s: float) -> None:
        self.machine = StepMachine(state, view, now_s)
        self.rejections: dict[SlackTrack, Rejection] = {}
        self.yields: list[Request] = []
        self.default_cause: Cause | None = None
        self._state, self._view, self._now_s = state, view, now_s

    def run(self) -> None:
        state = self._state
        for track in deadlines.unreachable(state, self._view, self._now_s):
            wait_s = state.prefill_s(len(track.tokens)) + self._view.load_s(track.request)
            self._reject(track, track.first_objective, wait_s)
        if not state.ledger.waiting:
            return
        self._start_aged()
        self._walk(state.backlog.affordable)
        self._walk(state.backlog.parked)
        self._walk_rest()

    # --- the walk -----------------------------------------------------------------------------------------------
    def _walk(self, tracks: list[SlackTrack]) -> None:
        """Admit from the head until a request does not fit; reject those that can no longer be in time."""
        for track in self._first_of(tracks):
            if track in self.rejections:
                continue
            is_new, candidate = track.forecast is None, self.machine.candidate(track)
            if is_new:
                track.forecast = self._forecast(candidate)
            if self._is_hopeless(candidate, is_new):
                continue
            objection = rules.objection(self.machine, candidate)
            if objection is None:
                self.machine.start(candidate)
                continue
            rule, cause = objection
            self._state.set_cause(track, cause)
            held = rule is rules.kv_blocks or cause is Cause.SLOTS  # other requests hold the memory that it lacks
            if held and not rules.time_for_prompt(self.machine, candidate):
                self.yields += self._could_yield(track)
            if candidate.price is None:
                self.default_cause = cause
            if self._blocks_others(candidate, rule, held):
                return

    def _blocks_others(self, candidate: WaitingCandidate, rule: rules.Rule, held: bool) -> bool:
        """True if no later request may overtake it: it lacks time for any pace, or has run before and lacks memory."""
        if held:
            return candidate.track.request.has_run or bool(self.yields)
        return rule in rules.IN_TURN and candidate.smallest_s == self.machine.smallest_s

    def _could_yield(self, track: SlackTrack) -> list[Request]:
        """Return unpromised requests whose KV blocks and slots suffice for the prompt of this one; none if they do not.
        No request is preempted twice for this, or a long one would compute its prompt again and again.
        """
        size, chosen = self._view.block_size, list[Request]()
        lacking, slots = self.machine.blocks_of(track) - self.machine.blocks, int(self.machine.seats <= 0)
        for other in reversed(self._state.unpromised.values()):
            if lacking <= 0 and len(chosen) >= slots:
                break
            is_free = other.is_demoted or other.request.slo is None
            if is_free and not other.request.preemptions and other.request not in self.yields:
                chosen.append(other.request)
                lacking -= other.request.planned // size
        return [] if lacking > 0 or len(chosen) < slots else chosen

    def _first_of(self, tracks: list[SlackTrack]) -> Iterator[SlackTrack]:
        """Yield the first requests that could start, each followed by the samples that start with it. Others do not
        count, because many samples may wait for one that comes later.
        """
        view, waiting = self._view, self._state.ledger.waiting
        leads = (track.request for track in tracks if view.can_start(track.request))
        for lead in islice(leads, self._state.tuning.looked_at):
            yield from [waiting[request.request_id] for request in view.members(lead)]

    def _forecast(self, candidate: WaitingCandidate) -> Forecast:
        """Predict first token and pace of a request that is considered for the first time, if it starts now."""
        state, track = self._state, candidate.track
        pace_s = max(state.alone_s(track), min(track.tpot_s, state.recent_step_s))
        return Forecast(self._now_s - track.request.arrival_s + self._wait_s(candidate), pace_s)

    def _wait_s(self, candidate: WaitingCandidate) -> float:
        """Return the seconds from now until the first token of a candidate that starts now."""
        seconds = (candidate.ahead_s + candidate.own_s) / self.machine.prefill_time(1.0)
        return self._view.load_s(candidate.track.request) + seconds + self._state.params.step_s

    # --- rejections ---------------------------------------------------------------------------------------------
    def _is_hopeless(self, candidate: WaitingCandidate, is_new: bool) -> bool:
        """Reject a request if it cannot be in time whatever happens, and return True."""
        state, track = self._state, candidate.track
        if track.request.has_run or not rejectable(track.request):
            return False
        if deadlines.unattainable(state, track):
            reason = track.pace_objective(state.alone_s(track))
            self._reject(track, reason, state.prefill_s(len(track.tokens)))
            return True
        if not self.machine.is_late(candidate) or self.machine.is_in_time_at_once(candidate):
            return False
        if is_new and self._now_s - track.request.arrival_s <= 2 * self.machine.chunk_ends_s:
            track.waits_for = None  # its price is not why it is late
        self._reject(track, track.first_objective, self._wait_s(candidate))
        return True

    def _reject(self, track: SlackTrack, reason: str, wait_s: float) -> None:
        track.count_uncached(self._view.uncached)
        cause = Cause.IDLE if deadlines.misses_alone(self._state, track) else track.waits_for or self._late_for(track)
        self.rejections[track] = Rejection(reason, self._now_s - track.request.arrival_s + wait_s, cause)

    def _late_for(self, track: SlackTrack) -> Cause:
        """Return the cause of a rejection before any wait: without it the request would have been in time. It is one of
        earlier prompts, the step that ran at its arrival, its transit, or the running requests.
        """
        machine, waited_s = self.machine, self._now_s - track.request.arrival_s
        if not machine.idle and waited_s > 2 * machine.chunk_ends_s:  # it was never considered
            return self.default_cause or Cause.QUEUE
        candidate, left_s = machine.candidate(track), machine.left_s(track)
        if rules.time_for_tokens(machine, candidate):
            return Cause.UTILISATION
        if candidate.own_s <= machine.prefill_time(left_s):
            return Cause.QUEUE
        if candidate.own_s > machine.prefill_time(left_s + waited_s) - candidate.ahead_s:
            p = self._state.params
            alone_s = candidate.own_s * (1 + (p.step_s + p.experts_s(inf)) / machine.full_s)
            return Cause.UTILISATION if alone_s <= left_s + waited_s else Cause.IDLE
        return Cause.STEP if self._view.running else Cause.TRANSIT

    # --- requests without objectives ----------------------------------------------------------------------------
    def _walk_rest(self) -> None:
        """Admit requests without objectives, the oldest first, until they lack something."""
        for track in self._first_of(self._state.backlog.rest):
            if track in self.machine.admitted:
                continue
            lacks = self._rest_lacks(track)
            if lacks is not None:
                self.default_cause = self.default_cause or lacks
                return
            self.machine.admit(track)

    def _rest_lacks(self, track: SlackTrack) -> Cause | None:
        """Return what a request without objectives lacks: time, a spare seat, or KV blocks; None if nothing."""
        spare = 0.0
        if self.machine.smallest_s < inf:
            if not self.machine.demand.fits(ROOMY_SHARE, self.machine.usable_share, self._state.params):
                return Cause.UTILISATION
            spare = SPARE_SEATS_SHARE * self._state.seats
        if self.machine.seats <= spare:
            return self.machine.view.seat_cause
        return Cause.BLOCKS if self.machine.reserved or not self.machine.has_blocks(track) else None

    def _start_aged(self) -> None:
        """Start the oldest request without objectives before all others if it has waited long, from `rest_again_s` on.
        If it cannot start yet, its seat and KV blocks are reserved. Otherwise other requests would take everything that
        becomes free.
        """
        track = next(self._first_of(self._state.backlog.rest), None)
        if track is None or self._now_s < self._state.rest_again_s:
            return
        if self._now_s < track.request.arrival_s + AGEING_S:
            return
        fits = self.machine.seats > 0 and self.machine.has_blocks(track)
        self.machine.admit(track, reserve=not fits)
