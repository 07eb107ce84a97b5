"""Attainable objectives: the value that a rejected request's objective should have had to be admitted."""

from copy import copy
from math import inf

from roseinfer.sched.policies.common.ledger import sane
from roseinfer.sched.policies.slack import deadlines, rules
from roseinfer.sched.policies.slack.admission import StepAdmission
from roseinfer.sched.policies.slack.machine import StepMachine
from roseinfer.sched.policies.slack.requests import SlackTrack

MIN_SAFETY_RATIO = 1.15  # of reported to expected value: requests that arrive meanwhile take their part
MIN_SLOWDOWN_RATIO = 1.15  # of a tried value to the one before
MAX_TRIES = 32
# What may depend on the objective.
_ASKED = [rule for rule in rules.RULES if rule not in (rules.a_seat, rules.kv_blocks)]


def explain(admission: StepAdmission) -> None:
    """Add attainable objectives to the rejections, given all starts."""
    machine = admission.machine
    for track, rejection in admission.rejections.items():
        found_s = attainable_s(machine, track, rejection.reason)
        admission.rejections[track] = rejection._replace(attainable_s=found_s)


def attainable_s(machine: StepMachine, track: SlackTrack, reason: str) -> float | None:
    """Return the smallest larger value of the objective `reason` at which no rule objects. Return None if there is
    none: then it depends on when other requests end, or on how many arrive.
    """
    if machine.seats <= 0 or not machine.has_blocks(track):  # these depend on no objective
        return None
    value_s = max(_least_s(machine, track, reason), getattr(track.slo, f"{reason}_s"))
    loosest = machine.candidate(_relaxed(machine, track, reason, value_s * MIN_SLOWDOWN_RATIO**MAX_TRIES))
    has_time = not rules.time_for_tokens(machine, loosest)
    for _ in range(MAX_TRIES):
        candidate = machine.candidate(_relaxed(machine, track, reason, value_s))
        if not machine.is_late(candidate) and not any(rule(machine, candidate) for rule in _ASKED):
            return MIN_SAFETY_RATIO * value_s
        value_s *= MIN_SLOWDOWN_RATIO
        if not has_time and candidate.smallest_s == loosest.smallest_s:
            return None  # a looser value would only make it lighter
    return None


def _least_s(machine: StepMachine, track: SlackTrack, reason: str) -> float:
    """Return a lower bound on the value."""
    state = machine.state
    alone_s = deadlines.MIN_PACE_STEPS * state.params.alone_s(len(track.tokens) + track.length)
    if reason == "tpot":
        return max(alone_s, state.price.pace_s)
    first_s = machine.now_s - track.request.arrival_s + machine.view.load_s(track.request)
    first_s += machine.own_s(track, track.count_uncached(machine.view.uncached)) + state.params.step_s
    if reason == "ttft":
        return first_s
    pace_s = max(alone_s, state.recent_step_s)
    length = max(track.length, state.lengths.total(track.request))  # as it would be expected now
    return (first_s + pace_s * deadlines.longest(state, track, length)) / (1 - deadlines.MIN_FIRST_SHARE)


def _relaxed(machine: StepMachine, track: SlackTrack, reason: str, value_s: float) -> SlackTrack:
    """Return the request as it would be with another objective."""
    relaxed = copy(track)
    if reason == "ttft":
        relaxed.promise_first_token(value_s)
    elif reason == "tpot":
        relaxed.tpot_s = value_s
    else:
        relaxed.end_s = track.request.arrival_s + value_s
        relaxed.promise_first_token(track.slo.ttft_s or inf)
        relaxed.tpot_s = sane(track.slo.tpot_s)
        deadlines.bound_whole(machine.state, relaxed)
    relaxed.tokens_per_step = 1.0
    if track.tpot_s < inf:
        relaxed.weight = track.weight * track.step_pace_s / relaxed.step_pace_s
    return relaxed
