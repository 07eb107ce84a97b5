"""Switches: what to replace in `slack` to do without one of its mechanisms.

Simulations use them to measure what each mechanism is worth. The policy itself has no switches.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from typing import Any
from unittest.mock import patch

from roseinfer.sched.policies.common.ledger import Track
from roseinfer.sched.policies.common.tenants import TenantShares
from roseinfer.sched.policies.slack import admission, policy, state
from roseinfer.sched.policies.slack.admission import SlackAdmission
from roseinfer.sched.policies.slack.capacity import Demand, Margins, PriceLimit
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policies.slack.step import SlackStep
from roseinfer.sched.policies.slack.tuning import Tuning


def returns(value: object) -> Any:
    """Return a replacement: a function that returns `value`, whatever its arguments."""
    return lambda original: lambda *_, **__: value


def becomes(value: object) -> Any:
    """Return a replacement by `value`."""
    return lambda original: value


def _at_no_price(objection: Any) -> Any:
    return lambda self, price_s, pace_s, can_wait: objection(self, 0.0, pace_s, can_wait)


def _impatient(objection: Any) -> Any:
    return lambda self, price_s, pace_s, can_wait: objection(self, price_s, pace_s, False)


def _fastest(paces: Any) -> Any:
    return lambda self, offered: paces(self, offered)[:1]


def _affordable(walk: Any) -> Any:
    return lambda self, entries, limit: walk(self, entries, limit) if limit == 1.0 else None


def _prompt_has_blocks(self: SlackAdmission, track: Track) -> bool:
    return -(-len(track.tokens) // self._view.block_size) <= self._blocks


def _skips_nothing(self: SlackStep, short_s: float, over_s: float) -> float:
    return self.limit_s - self._decode_s


# Mechanism -> owner, attribute, and a function from the original to its replacement. Switches for the same attribute
# therefore combine. `Tuning` as owner: the constant that is replaced.
SWITCHES: dict[str, Sequence[tuple[Any, str, Any]]] = {
    "demotion": [(SlackStep, "_lost", returns(False))],
    "shedding": [(SlackState, "unreachable", returns(())), (admission, "rejectable", returns(False))],
    "work-order": [(Tuning, "cost_weight", becomes(0.0))],
    "demand": [(Demand, "fits", returns(True))],
    "forecast": [(SlackState, "arriving", returns(0.0))],
    "reserve": [(Tuning, "reserve", becomes(0.0))],
    "price": [(PriceLimit, "objection", _at_no_price)],
    "patient": [(PriceLimit, "objection", _impatient), (admission, "MAX_CAN_WAIT_SHARE", becomes(inf))],
    "fill": [(PriceLimit, "_adapt_fill", returns(None))],
    "pace": [(PriceLimit, "_paces", _fastest)],
    "give-up": [(SlackState, "give_up_paces", returns(None)), (SlackState, "gives_up_pace", returns(False))],
    "parked": [(SlackAdmission, "_walk", _affordable)],
    "kv-peak": [(SlackAdmission, "_has_blocks", becomes(_prompt_has_blocks))],
    "yield": [(SlackAdmission, "_could_yield", returns([]))],
    "skip": [(SlackStep, "_skip", becomes(_skips_nothing))],
    "catch-up": [(Tuning, "catch_up", becomes(inf))],
    "guard": [(SlackStep, "_guard", returns(0.0))],
    "unsteady": [(Tuning, "unsteady", becomes(1.0))],
    "hurry": [(SlackState, "pace_outlived", returns(None))],
    "length-error": [(SlackState, "wrong_by", returns(0.0))],
    "reprice": [(SlackState, "demote_outlived", returns(None)), (SlackState, "_reprice", returns(None))],
    "stalls": [(state, "MIN_STALL_RATIO", becomes(inf))],
    "margins": [(Margins, "observe", returns(None))],
    "ageing": [(SlackAdmission, "_start_aged", returns(None))],
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
