"""Causes of waits and rejections under slack: the objective, the cause, and the attainable value."""

from math import inf

import pytest

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import OracleLengths
from roseinfer.sched.policies.slack.overload import PriceLimit
from roseinfer.sched.policies.slack.policy import SlackOptions, SlackPolicy
from roseinfer.sched.policy import Ended, Explaining, Forecasting, Queued
from tests.sched.queues import State

# 10 ms a step, 1 ms a prompt token, 1 ms a decoding request.
COST = CostParams(step_s=0.010, token_s=0.001, pair_s=0.0, row_s=0.001, context_s=0.0)


def state(**limits: int) -> State:
    known = Estimates(CostModel(COST, fit=False), OracleLengths())
    policy = SlackPolicy(SchedulerConfig(scheduling_policy="slack"), SlackOptions(), known)
    policy.state.cost.steps = 50
    return State(policy, **limits)


def refused(made: State, name: str, at_s: float) -> tuple[str, Cause]:
    """Arrival time with which it has waited that long."""
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


def test_a_machine_that_was_slower_for_a_few_steps_refuses_nothing_for_ever() -> None:
    """A lone step takes 11 ms, and 22 ms while something else uses the machine: too long for an objective of 15 ms."""
    cost = CostModel(COST)
    policy = SlackPolicy(SchedulerConfig(scheduling_policy="slack"), SlackOptions(), Estimates(cost, OracleLengths()))
    for _ in range(300):
        cost.observe(Work(decode_rows=1), 0.011)
    for _ in range(8):
        cost.observe(Work(decode_rows=1), 0.022)
    made = State(policy)
    made.wait("a", ttft_s=1.0, tpot_s=0.015)
    assert cost.params.rows_s(1, 0) > 0.020 and not made.rejected(made.begin())
    for _ in range(300):
        cost.observe(Work(decode_rows=1), 0.022)
    made.wait("b", ttft_s=1.0, tpot_s=0.015)
    assert made.rejected(made.begin())["b"].cause is Cause.IDLE


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


@pytest.mark.parametrize("objectives", [{}, {"ttft_s": 5.0}, {"e2e_s": 5.0}])
def test_a_single_token_is_not_refused_for_its_pace(objectives: dict[str, float]) -> None:
    made = state()
    made.wait("a", 50, predicted=1, max_tokens=1, tpot_s=0.001, **objectives)
    assert made.rejected(made.begin()) == {}


@pytest.mark.parametrize("others", [0, 3])
def test_an_end_that_an_idle_machine_would_not_promise_either(others: int) -> None:
    """A prompt of 0.1 s, then 10 tokens of 11 ms; but it may have 64 more, and then nothing is left for the prompt."""
    made = state()
    for number in range(others):
        made.run(f"other{number}", tpot_s=0.050)
    made.wait("a", 90, predicted=10, e2e_s=0.6)
    rejection = made.rejected(made.begin())["a"]
    assert (rejection.reason, rejection.cause) == ("e2e", Cause.IDLE)


def test_the_reason_is_an_objective_that_the_request_has() -> None:
    """The end sets a pace, and steps have become three times as long since then."""
    made = state()
    made.wait("a", e2e_s=3.0)
    made.policy.state.cost.params = COST.slower(3.0)
    assert made.rejected(made.begin())["a"].reason == "e2e"


def test_no_value_below_the_objective_was_attainable() -> None:
    """Steps were slow when it came, so a tenth of its time is for the prompt, whose adapter takes longer to load."""
    made = state()
    made.policy.state.recent_step_s = 0.1
    made.wait("a", predicted=10, e2e_s=3.0)
    made.policy.state.recent_step_s, made.load_s = 0.011, 0.4
    rejection = made.rejected(made.begin())["a"]
    assert rejection.reason == "e2e" and rejection.attainable_s is not None and rejection.attainable_s > 3.0


def test_a_single_token_could_have_had_an_end_whatever_its_pace() -> None:
    made = state()
    made.wait("a", 50, predicted=1, max_tokens=1, tpot_s=0.001, e2e_s=0.01)
    rejection = made.rejected(made.begin())["a"]
    assert rejection.reason == "e2e" and rejection.attainable_s is not None


@pytest.mark.parametrize("others", [0, 3])
def test_a_prompt_that_takes_too_many_steps_whoever_runs(others: int) -> None:
    """0.5 s in steps of 64 tokens that take 10 ms more each."""
    made = state(budget=64)
    for number in range(others):
        made.run(f"other{number}")
    made.wait("a", 500, ttft_s=0.55)
    assert made.rejected(made.begin())["a"].cause is Cause.IDLE


def test_who_came_too_late_to_an_idle_machine_did_not_wait_for_prompts() -> None:
    made = state()
    made.wait("a", ttft_s=0.1)
    made.now_s = 0.095
    assert made.rejected(made.begin())["a"].cause is Cause.TRANSIT


@pytest.mark.parametrize(("objectives", "reason"), [({"ttft_s": 1.0, "e2e_s": 90.0}, "ttft"), ({"e2e_s": 9.0}, "e2e")])
def test_the_objective_that_asks_for_the_first_token_is_the_reason(objectives: dict[str, float], reason: str) -> None:
    made = state(seats=0)
    made.run("a", tpot_s=0.050)
    made.wait("b", **objectives)
    assert refused(made, "b", 9.5) == (reason, Cause.SEATS)


NOT_ROOMY = 30  # rows: 40 of 50 ms


def priced(limit: PriceLimit, rows: int = 1, **limits: int) -> State:
    made = state(**limits)
    for number in range(rows):
        made.run(f"{number}", tpot_s=0.050)
    made.policy.state.price = limit
    limit.update = lambda *_: False  # type: ignore[method-assign]
    return made


def test_a_price_above_the_limit_is_the_cause_whatever_else_it_lacked() -> None:
    limit = PriceLimit()
    limit.limit_s = 0.050
    made = priced(limit, NOT_ROOMY)
    made.wait("dear", 10, predicted=100, ttft_s=1.0, tpot_s=0.050)
    assert refused(made, "dear", 2.0) == ("ttft", Cause.PRICE)


def test_a_price_above_the_limit_is_the_cause_even_if_it_is_first_looked_at_when_it_is_late() -> None:
    """A prompt that takes 30 ms alone, after others that were considered before it."""
    limit = PriceLimit()
    limit.limit_s = 0.050
    made = priced(limit)
    made.wait("dear", 20, predicted=100, ttft_s=1.0, tpot_s=0.050)
    made.now_s = 0.968
    assert made.rejected(made.begin())["dear"].cause is Cause.PRICE


def test_a_pace_that_is_not_held() -> None:
    limit = PriceLimit()
    limit.pace_s = 0.050
    made = priced(limit, NOT_ROOMY)
    made.wait("tight", 10, ttft_s=1.0, tpot_s=0.030)
    assert refused(made, "tight", 2.0) == ("ttft", Cause.PACE)


def test_who_became_worth_its_price_waits_for_something_else() -> None:
    limit = PriceLimit()
    limit.limit_s = 0.050
    made = priced(limit, seats=0)
    made.wait("dear", 10, predicted=100, ttft_s=1.0, tpot_s=0.050)
    limit.limit_s = inf
    made.policy.state.backlog.sort_by_price(made.policy.state.is_affordable)
    assert refused(made, "dear", 2.0) == ("ttft", Cause.SEATS)


# --- those that wait ------------------------------------------------------------------------------------------------
def said(made: State) -> tuple[dict[str, Cause], Cause]:
    """Return the next plan's causes of waiting requests, by name, and the default cause."""
    decision = made.begin()
    assert isinstance(decision, Explaining)
    return {request.request_id: cause for request, cause in decision.wait_causes()}, decision.default_cause()


@pytest.mark.parametrize("limits", [{"seats": 0}, {"free_blocks": 0}])
def test_only_what_is_new_is_said(limits: dict[str, int]) -> None:
    made = state(**limits)
    made.run("a", tpot_s=0.050)
    made.wait("b", ttft_s=9.0, tpot_s=0.050)
    cause = Cause.SEATS if "seats" in limits else Cause.BLOCKS
    assert said(made) == ({"b": cause}, cause)
    assert said(made) == ({}, cause)


def test_a_seat_would_not_help_where_those_that_run_need_all_of_the_time() -> None:
    made = state(seats=0)
    for name in "abcd":
        made.run(name, tpot_s=0.015)
    made.wait("e", ttft_s=5.0, tpot_s=0.015)
    assert said(made) == ({"e": Cause.UTILISATION}, Cause.UTILISATION)


def test_a_low_price_would_not_help_where_there_is_room_to_spare_but_no_seat() -> None:
    limit = PriceLimit()
    limit.limit_s = 0.050
    made = priced(limit, seats=0)
    limit.update = lambda *_: True  # type: ignore[method-assign]
    made.wait("dear", 10, predicted=100, ttft_s=1.0, tpot_s=0.050)
    assert said(made)[0]["dear"] is Cause.SEATS


def test_a_price_that_only_its_tenant_makes_too_high() -> None:
    made = state()
    tenants = made.policy.state.tenants
    tenants.charge("large", 9.0, 0.0)
    tenants.charge("small", 1.0, 0.0)
    limit = made.policy.state.price
    for name in "abcd":
        made.run(name, tpot_s=0.015)
    limit.limit_s, limit.update = 0.200, lambda *_: False  # type: ignore[method-assign]
    for tenant in ("large", "small"):
        made.wait(f"of {tenant}", predicted=100, tenant=tenant, ttft_s=5.0, tpot_s=0.050)
    assert said(made)[0] == {"of large": Cause.TENANT, "of small": Cause.UTILISATION}


def test_who_must_compute_its_prompt_again_waits_for_blocks() -> None:
    made = state(free_blocks=0)
    made.run("a", tpot_s=0.050)
    again = made.run("b", tpot_s=0.050)
    put_out(made, again)
    assert said(made)[0] == {"b": Cause.BLOCKS}


def put_out(made: State, request: Request) -> None:
    made.running.remove(request)
    request.status, request.preemptions = Status.WAITING, 1
    made.waiting.append(request)
    made.policy.observe(Queued(request))


def test_those_without_objectives_wait_in_line() -> None:
    made = state()
    for name in "abcd":
        made.run(name, tpot_s=0.015)
    made.wait("rest")
    assert said(made) == ({}, Cause.UTILISATION)


def test_a_prompt_for_which_the_step_has_no_tokens() -> None:
    made = state(budget=100)
    made.start(made.wait("first", 2000))
    made.wait("second", 100, ttft_s=300.0)
    made.wait("third", 100, ttft_s=300.0)
    assert said(made)[0] == {"third": Cause.BUDGET}


def test_what_was_expected_of_it_when_it_came() -> None:
    """A prompt of 0.5 s behind one of 1 s."""
    made = state()
    made.start(made.wait("first", 1000, ttft_s=1.5))
    second = made.wait("second", 500, ttft_s=9.0, tpot_s=0.050)
    policy = made.policy
    assert isinstance(policy, Forecasting) and policy.forecast(second) == (None, None)
    made.begin()
    forecast = policy.forecast(second)
    assert forecast.ttft_s == pytest.approx(1.5, rel=0.05) and forecast.tpot_s == pytest.approx(0.011)
    made.now_s = 1.0
    made.begin()
    assert policy.forecast(second) == forecast


def test_no_pace_is_expected_that_a_step_of_its_own_does_not_keep() -> None:
    made = state()
    assert isinstance(made.policy, Forecasting)
    hasty = made.wait("hasty", tpot_s=0.001)
    made.begin()
    assert made.policy.forecast(hasty).tpot_s == pytest.approx(0.011)


# --- what could have been kept --------------------------------------------------------------------------------------
OUT_OF_REACH = [
    ("ttft", {"ttft_s": 0.001, "tpot_s": 0.050}),
    ("ttft", {"ttft_s": 0.400}),
    ("tpot", {"ttft_s": 9.0, "tpot_s": 0.005}),
    ("e2e", {"e2e_s": 0.4}),
    ("e2e", {"e2e_s": 0.8}),
]


@pytest.mark.parametrize(("reason", "objectives"), OUT_OF_REACH)
@pytest.mark.parametrize("busy", [False, True])
def test_what_is_attainable_is_kept(reason: str, objectives: dict[str, float], busy: bool) -> None:
    made = state()
    if busy:
        made.start(made.wait("prompt", 800, ttft_s=5.0))
        for name in "abc":
            made.run(name, tpot_s=0.050)
    made.wait("tight", 500, **objectives)
    decision = made.begin()
    rejection = made.rejected(decision)["tight"]
    refused = objectives[f"{reason}_s"]
    assert rejection.reason == reason and rejection.attainable_s is not None and rejection.attainable_s > refused
    made.waiting[-1].status = Status.FINISHED
    made.policy.observe(Ended("tight", 0.0, FinishReason.REJECTED, 0))
    made.wait("loose", 500, **{**objectives, f"{reason}_s": rejection.attainable_s})
    decision = made.begin()
    assert not made.rejected(decision) and (busy or "loose" in made.admitted(decision))


def test_nobody_can_say_when_a_seat_comes_free() -> None:
    made = state(seats=0)
    made.run("a", tpot_s=0.050)
    made.wait("tight", 500, ttft_s=0.001)
    assert made.rejected(made.begin())["tight"].attainable_s is None
