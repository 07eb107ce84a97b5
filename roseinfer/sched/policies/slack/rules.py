"""Rules of admission: what a waiting request lacks before it can start, asked in the order of `RULES`."""

from collections.abc import Callable, Sequence

from roseinfer.core.slo import Cause
from roseinfer.sched.policies.slack.demand import MAX_CONSTANT_SHARE, Demand
from roseinfer.sched.policies.slack.machine import StepMachine, WaitingCandidate
from roseinfer.sched.policies.slack.terms import ROOMY_SHARE

MAX_CAN_WAIT_SHARE = 0.9  # of the usable machine, for requests that can wait, under overload
MAX_URGENT_PACES = 100.0  # until the first token, of a request that may use some of the reserve
URGENT_RESERVE_SHARE = 0.15  # of the machine, which they leave free under overload


def time_for_tokens(machine: StepMachine, candidate: WaitingCandidate) -> Cause | None:
    """Demand time for its tokens and those of the running requests: of the whole machine, or only of its roomy part for
    a request above the price limit.
    """
    if candidate.is_free or _fits(machine, candidate, machine.demand, candidate.track.weight):
        return None
    return Cause.UTILISATION


def room_for_urgent(machine: StepMachine, candidate: WaitingCandidate) -> Cause | None:
    """Under overload, requests that can wait leave the machine to those that cannot, as many as have arrived."""
    state, track = machine.state, candidate.track
    if not (track.can_wait and state.price.overloaded) or candidate.is_free:
        return None
    constant = min(MAX_CONSTANT_SHARE, state.cost_tangent(candidate.smallest_s)[0] / candidate.smallest_s)
    usable_share = candidate.usable_share - constant
    usable_share -= URGENT_RESERVE_SHARE if state.price.load else 0.0
    taken = state.can_wait_weight + track.weight + state.price.load
    return Cause.UTILISATION if taken > MAX_CAN_WAIT_SHARE * usable_share else None


def a_seat(machine: StepMachine, candidate: WaitingCandidate) -> Cause | None:
    return machine.view.seat_cause if machine.seats <= 0 else None


def kv_blocks(machine: StepMachine, candidate: WaitingCandidate) -> Cause | None:
    return None if machine.has_blocks(candidate.track) else Cause.BLOCKS


def others_first_tokens(machine: StepMachine, candidate: WaitingCandidate) -> Cause | None:
    """Refuse to make a started prompt late that is due after it."""
    track, own_s, ahead_s = candidate.track, candidate.own_s, candidate.ahead_s
    for due_s, seconds in machine.prompts:
        if due_s > track.due_s:
            ahead_s += seconds
            time_s = machine.prefill_time(due_s - machine.now_s - machine.chunk_ends_s)
            if ahead_s <= time_s < ahead_s + own_s:
                return Cause.QUEUE
    return None


def time_for_prompt(machine: StepMachine, candidate: WaitingCandidate) -> Cause | None:
    """Demand time for its prompt as well."""
    return None if _prompt_fits(machine, candidate, 0.0) else Cause.UTILISATION


def a_reserve(machine: StepMachine, candidate: WaitingCandidate) -> Cause | None:
    """A request that is neither urgent nor cheap must leave a reserve for those that are."""
    if candidate.is_free or _prompt_fits(machine, candidate, _reserve(machine, candidate)):
        return None
    return Cause.UTILISATION


def _prompt_fits(machine: StepMachine, candidate: WaitingCandidate, reserve: float) -> bool:
    fits = candidate.is_free or _fits(machine, candidate, candidate.demand, 0.0, reserve)
    return fits or machine.is_in_time_at_once(candidate)


def _fits(
    machine: StepMachine, candidate: WaitingCandidate, demand: Demand, weight: float, reserve: float = 0.0
) -> bool:
    limit = 1.0 if candidate.price is None else ROOMY_SHARE
    return demand.fits(limit - reserve, candidate.usable_share, machine.state.params, weight)


def _reserve(machine: StepMachine, candidate: WaitingCandidate) -> float:
    mean_s, track = machine.state.price.mean_s, candidate.track
    left_s = max(0.0, track.due_s - machine.now_s - candidate.smallest_s)
    left = min(1.0, left_s / (MAX_URGENT_PACES * candidate.smallest_s))
    return machine.state.tuning.reserve * left * (min(2.0, track.price_s / mean_s) if mean_s else 1.0)


Rule = Callable[[StepMachine, WaitingCandidate], Cause | None]
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


def objection(machine: StepMachine, candidate: WaitingCandidate) -> tuple[Rule, Cause] | None:
    """Return the first of `RULES` that objects and the cause, None if the request can start. To a request that is not
    worth its cost, time is only refused for that.
    """
    for rule in RULES:
        cause = rule(machine, candidate)
        if cause is not None:
            return rule, candidate.price or cause if cause is Cause.UTILISATION else cause
    return None
