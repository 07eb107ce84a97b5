"""Why the slack policy turned somebody away, as data: the objective, and what stood against it."""

from math import inf

import pytest

from roseinfer.core.config import SchedulerConfig
from roseinfer.core.slo import Cause
from roseinfer.sched.cost import CostModel, CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths import OracleLengths
from roseinfer.sched.policies.slack.capacity import PriceLimit
from roseinfer.sched.policies.slack.policy import SlackOptions, SlackPolicy
from tests.sched.queues import State

# 10 ms a step, 1 ms a prompt token, 1 ms a decoding request.
COST = CostParams(step_s=0.010, token_s=0.001, pair_s=0.0, row_s=0.001, context_s=0.0)


def state(**limits: int) -> State:
    known = Estimates(CostModel(COST, fit=False), OracleLengths())
    policy = SlackPolicy(SchedulerConfig(scheduling_policy="slack"), SlackOptions(), known)
    policy.state.cost.steps = 50
    return State(policy, **limits)


def refused(made: State, name: str, at_s: float) -> tuple[str, Cause]:
    """By when it has waited until then."""
    assert not made.rejected(made.begin())
    made.now_s = at_s
    rejection = made.rejected(made.begin())[name]
    return rejection.reason, rejection.cause


@pytest.mark.parametrize("limits", [{"seats": 0}, {"free_blocks": 0}])
def test_a_seat_or_room_in_the_cache_that_did_not_come_free(limits: dict[str, int]) -> None:
    made = state(**limits)
    made.run("a", tpot_s=0.050)
    made.wait("b", ttft_s=1.0, tpot_s=0.050)
    assert refused(made, "b", 2.0) == ("ttft", Cause.SEATS if "seats" in limits else Cause.BLOCKS)


def test_those_that_run() -> None:
    """A step every 15 ms has 5 ms for rows; four of 1 ms run, and a fifth is too much with the margin."""
    made = state()
    for name in "abcd":
        made.run(name, tpot_s=0.015)
    made.wait("e", ttft_s=5.0, tpot_s=0.015)
    assert refused(made, "e", 6.0) == ("ttft", Cause.UTILISATION)


def test_prompts_before_it() -> None:
    """2 s of one that has started, then 1.5 s of its own: too much for 3 s, and known at once."""
    made = state()
    made.start(made.wait("first", 2000, ttft_s=2.9))
    made.wait("second", 1500, ttft_s=3.0)
    rejection = made.rejected(made.begin())["second"]
    assert (rejection.reason, rejection.cause) == ("ttft", Cause.QUEUE)


def test_steps_full_of_decoding_leave_no_time_for_a_prompt() -> None:
    made = state()
    for name in "abcd":
        made.run(name, tpot_s=0.015)
    made.wait("e", 900, ttft_s=1.0, tpot_s=0.015)
    rejection = made.rejected(made.begin())["e"]
    assert (rejection.reason, rejection.cause) == ("ttft", Cause.UTILISATION)


@pytest.mark.parametrize(
    ("objectives", "reason"),
    [({"ttft_s": 0.4}, "ttft"), ({"tpot_s": 0.005}, "tpot"), ({"e2e_s": 0.8}, "e2e"), ({"e2e_s": 0.4}, "e2e")],
)
def test_what_an_idle_machine_would_miss_as_well(objectives: dict[str, float], reason: str) -> None:
    """A prompt of 0.5 s, and some 100 tokens of 11 ms at least."""
    made = state()
    made.wait("a", 500, **objectives)
    rejection = made.rejected(made.begin())["a"]
    assert (rejection.reason, rejection.cause, rejection.hopeless) == (reason, Cause.IDLE, True)


@pytest.mark.parametrize(("objectives", "reason"), [({"ttft_s": 1.0, "e2e_s": 90.0}, "ttft"), ({"e2e_s": 9.0}, "e2e")])
def test_the_objective_that_asks_for_the_first_token_is_the_reason(objectives: dict[str, float], reason: str) -> None:
    made = state(seats=0)
    made.run("a", tpot_s=0.050)
    made.wait("b", **objectives)
    assert refused(made, "b", 9.5) == (reason, Cause.SEATS)


def priced(limit: PriceLimit) -> State:
    made = state(seats=0)
    made.run("a", tpot_s=0.050)
    made.policy.state.price = limit
    limit.update = lambda *_: False  # type: ignore[method-assign]
    return made


def test_a_price_above_the_limit_is_the_cause_whatever_else_it_lacked() -> None:
    limit = PriceLimit()
    limit.limit_s = 0.050
    made = priced(limit)
    made.wait("dear", 10, predicted=100, ttft_s=1.0, tpot_s=0.050)
    assert refused(made, "dear", 2.0) == ("ttft", Cause.PRICE)


def test_a_pace_that_is_not_held() -> None:
    limit = PriceLimit()
    limit.pace_s = 0.050
    made = priced(limit)
    made.wait("tight", 10, ttft_s=1.0, tpot_s=0.030)
    assert refused(made, "tight", 2.0) == ("ttft", Cause.PACE)


def test_who_became_worth_its_price_waits_for_something_else() -> None:
    limit = PriceLimit()
    limit.limit_s = 0.050
    made = priced(limit)
    made.wait("dear", 10, predicted=100, ttft_s=1.0, tpot_s=0.050)
    limit.limit_s = inf
    made.policy.state.backlog.sort_by_price(made.policy.state.worth)
    assert refused(made, "dear", 2.0) == ("ttft", Cause.SEATS)
