"""Switches: what to replace in `slack` to do without one of its mechanisms.

Simulations use them to measure what each mechanism is worth. The policy itself has no switches.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any
from unittest.mock import patch

from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.sched.policies.common.ledger import Track
from roseinfer.sched.policies.common.tenants import TenantShares
from roseinfer.sched.policies.slack import admission, state
from roseinfer.sched.policies.slack.admission import SlackAdmission
from roseinfer.sched.policies.slack.capacity import Demand, Margins, PriceLimit
from roseinfer.sched.policies.slack.policy import SlackPolicy
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policies.slack.step import SlackStep
from roseinfer.sched.policies.slack.tuning import Tuning


def returns(value: object) -> Any:
    """Return a function that returns `value`, whatever its arguments."""
    return lambda *_, **__: value


def _only_pace_objection(self: PriceLimit, price_s: float, pace_s: float, can_wait: bool) -> Cause | None:
    if self.overloaded and can_wait:
        return Cause.PRICE
    return Cause.PACE if pace_s < self.pace_s else None


def _impatient_objection(self: PriceLimit, price_s: float, pace_s: float, can_wait: bool) -> Cause | None:
    if price_s > self.limit_s:
        return Cause.PRICE
    return Cause.PACE if pace_s < self.pace_s else None


def _prompt_has_blocks(self: SlackAdmission, track: Track) -> bool:
    return -(-len(track.tokens) // self._view.block_size) <= self._blocks


def _skips_nothing(self: SlackStep, short_s: float, over_s: float) -> float:
    return self.limit_s - self._decode_s


_paces = PriceLimit._paces
_walk = SlackAdmission._walk


def _fastest_pace(self: PriceLimit, offered: Sequence[Any]) -> list[float]:
    return _paces(self, offered)[:1]


def _walk_affordable(self: SlackAdmission, entries: list[Any], limit: float) -> None:
    if limit == 1.0:
        _walk(self, entries, limit)


def _never(request: Request) -> bool:
    return False


# Mechanism -> owner, attribute, and replacement. `Tuning` as owner: the constant that is replaced.
SWITCHES: dict[str, Sequence[tuple[Any, str, Any]]] = {
    "demotion": [(SlackStep, "_lost", returns(False))],
    "shedding": [(SlackState, "unreachable", returns(())), (admission, "rejectable", _never)],
    "work-order": [(Tuning, "cost_weight", 0.0)],
    "demand": [(Demand, "fits", returns(True))],
    "forecast": [(SlackState, "arriving", returns(0.0))],
    "reserve": [(Tuning, "reserve", 0.0)],
    "price": [(PriceLimit, "objection", _only_pace_objection)],
    "patient": [(PriceLimit, "objection", _impatient_objection), (admission, "MAX_CAN_WAIT_SHARE", inf)],
    "fill": [(PriceLimit, "_adapt_fill", returns(None))],
    "pace": [(PriceLimit, "_paces", _fastest_pace)],
    "give-up": [(SlackState, "give_up_paces", returns(None)), (SlackState, "gives_up_pace", returns(False))],
    "parked": [(SlackAdmission, "_walk", _walk_affordable)],
    "kv-peak": [(SlackAdmission, "_has_blocks", _prompt_has_blocks)],
    "yield": [(SlackAdmission, "_could_yield", returns([]))],
    "skip": [(SlackStep, "_skip", _skips_nothing)],
    "catch-up": [(Tuning, "catch_up", inf)],
    "guard": [(SlackStep, "_guard", returns(0.0))],
    "unsteady": [(Tuning, "unsteady", 1.0)],
    "hurry": [(SlackState, "pace_outlived", returns(None))],
    "length-error": [(SlackState, "wrong_by", returns(0.0))],
    "reprice": [(SlackState, "demote_outlived", returns(None)), (SlackState, "_reprice", returns(None))],
    "stalls": [(state, "MIN_STALL_RATIO", inf)],
    "margins": [(Margins, "observe", returns(None))],
    "ageing": [(SlackAdmission, "_start_aged", returns(None))],
    "tenants": [(TenantShares, "excess", returns(0.0))],
}


@contextmanager
def without(mechanisms: Iterable[str]) -> Iterator[None]:
    """Let policies that are made and used in this context do without these mechanisms."""
    constants: dict[str, Any] = {}
    with ExitStack() as stack:
        for owner, name, replacement in (change for each in mechanisms for change in SWITCHES[each]):
            if owner is Tuning:
                constants[name] = replacement
            else:
                stack.enter_context(patch.object(owner, name, replacement))
        if constants:
            stack.enter_context(_constants(constants))
        yield


def _constants(constants: dict[str, Any]) -> Any:
    make = SlackPolicy.__init__

    def tuned(self: SlackPolicy, config: Any, options: Any, known: Any) -> None:
        make(self, config, options, known, Tuning(**constants))

    return patch.object(SlackPolicy, "__init__", tuned)
