"""Switches: what to replace in `slack` to do without one of its mechanisms.

Simulations use them to measure what each mechanism is worth. The policy itself has no switches.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from typing import Any
from unittest.mock import patch

from roseinfer.sched.policies.common.tenants import TenantShares
from roseinfer.sched.policies.slack import admission, deadlines, overload, policy, rules, step
from roseinfer.sched.policies.slack.admission import StepAdmission
from roseinfer.sched.policies.slack.demand import Demand
from roseinfer.sched.policies.slack.machine import StepMachine
from roseinfer.sched.policies.slack.overload import PriceLimit
from roseinfer.sched.policies.slack.requests import SlackTrack
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policies.slack.step import SlackStep
from roseinfer.sched.policies.slack.terms import Margins, Tuning


def returns(value: object) -> Any:
    """Return a replacement: a function that returns `value`, whatever its arguments."""
    return lambda original: lambda *_, **__: value


def becomes(value: object) -> Any:
    """Return a replacement by `value`."""
    return lambda original: value


def no_longer_has(rule: rules.Rule) -> Any:
    """Return a replacement: the same rules without this one."""
    return lambda original: tuple(other for other in original if other is not rule)


def _at_no_price(objection: Any) -> Any:
    return lambda self, price_s, pace_s, can_wait: objection(self, 0.0, pace_s, can_wait)


def _impatient(objection: Any) -> Any:
    return lambda self, price_s, pace_s, can_wait: objection(self, price_s, pace_s, False)


def _fastest(paces: Any) -> Any:
    return lambda offered: paces(offered)[:1]


def _affordable(walk: Any) -> Any:
    return lambda self, entries: None if entries is self._state.backlog.parked else walk(self, entries)


def _prompt_has_blocks(machine: StepMachine, track: SlackTrack) -> bool:
    return machine.blocks_of(track) <= machine.blocks


# Mechanism -> owner, attribute, and a function from the original to its replacement. Switches for the same attribute
# therefore combine. `Tuning` as owner: the constant that is replaced.
SWITCHES: dict[str, Sequence[tuple[Any, str, Any]]] = {
    "demotion": [(deadlines, "_is_lost", returns(False))],
    "shedding": [(deadlines, "rejectable", returns(False)), (admission, "rejectable", returns(False))],
    "work-order": [(Tuning, "cost_weight", becomes(0.0))],
    "demand": [(Demand, "fits", returns(True))],
    "forecast": [(SlackState, "arriving", returns(0.0))],
    "first-tokens": [(rules, "RULES", no_longer_has(rules.others_first_tokens))],
    "reserve": [(rules, "RULES", no_longer_has(rules.a_reserve))],
    "price": [(PriceLimit, "objection", _at_no_price)],
    "patient": [
        (PriceLimit, "objection", _impatient),
        (rules, "RULES", no_longer_has(rules.room_for_urgent)),
    ],
    "pace": [(overload, "_paces", _fastest)],
    "parked": [(StepAdmission, "_walk", _affordable)],
    "kv-peak": [(StepMachine, "has_blocks", becomes(_prompt_has_blocks))],
    "yield": [(StepAdmission, "_could_yield", returns([]))],
    "skip": [(SlackStep, "_skip", returns(0.0))],
    "catch-up": [(step, "CATCH_UP_STEPS", becomes(inf))],
    "unsteady": [(step, "MAX_STRETCH_RATIO", becomes(1.0))],
    "prompt-share": [(step, "MIN_PREFILL_SHARE", becomes(0.0))],
    "hurry": [(deadlines, "pace_outlived", returns(None))],
    "length-error": [(deadlines, "likely_error", returns(0.0))],
    "stalls": [(policy, "MIN_STALL_RATIO", becomes(inf))],
    "margins": [(Margins, "observe", returns(None))],
    "ageing": [(StepAdmission, "_start_aged", returns(None))],
    "tenants": [(TenantShares, "excess", returns(0.0))],
}


@contextmanager
def without(mechanisms: Iterable[str]) -> Iterator[None]:
    """Let policies that are made and used in this context do without these mechanisms."""
    constants: dict[str, Any] = {}
    with ExitStack() as stack:
        for owner, name, replace in (change for each in mechanisms for change in SWITCHES[each]):
            if owner is Tuning:
                constants[name] = replace(None)
            else:
                stack.enter_context(patch.object(owner, name, replace(getattr(owner, name))))
        stack.enter_context(patch.object(policy, "Tuning", partial(Tuning, **constants)))
        yield
