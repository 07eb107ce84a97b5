"""Price limit under overload, and how `slack_fairness` and priorities change it."""

from dataclasses import replace

import pytest

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import OracleLengths
from roseinfer.sched.policies.slack.overload import Offer, PriceLimit
from roseinfer.sched.policies.slack.policy import SlackPolicy
from roseinfer.sched.policies.slack.terms import SlackOptions, Tuning
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.arrivals import OptionArrivals
from roseinfer.sim.config import WorkloadConfig
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.sweep import LoadPoint, PolicySweep, run_sweep
from tests.sched.queues import State

# 10 ms a step, 1 ms a prompt token, 1 ms a decoding request.
COST = CostParams(step_s=0.010, token_s=0.001, pair_s=0.0, row_s=0.001, context_s=0.0)


# --- fairness ---------------------------------------------------------------------------------------------------
def known(*works_s: float) -> PriceLimit:
    limit = PriceLimit()
    for work_s in works_s:
        limit.offer(Offer(0.0, work_s, work_s, 1.0))
    limit.update(0.1, 1.0, lambda pace_s: (0.0, 0.0))
    return limit


def test_without_fairness_the_price_is_the_work() -> None:
    assert known(1.0, 2.0, 3.0).price_s(2.5, 0.0) == 2.5


def test_with_it_a_request_counts_as_the_one_that_has_its_place_among_all() -> None:
    """Nine of 1 to 9 s: the first of each third counts as the first of all, the second as the fourth, and so on."""
    limit = known(*range(1, 10))
    assert [limit.price_s(work_s - 0.5, 1.0) for work_s in range(1, 10)] == [1, 4, 7] * 3


def test_between_the_two_it_is_between_the_two() -> None:
    limit = known(*range(1, 10))
    prices = [limit.price_s(6.5, fairness) for fairness in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert prices == sorted(prices, reverse=True)
    assert prices[1] == pytest.approx((6.5 * 1.0) ** 0.5)


def test_of_an_unknown_load_the_work_counts() -> None:
    assert PriceLimit().price_s(3.0, 1.0) == 3.0
    assert known(2.0).price_s(3.0, 1.0) == 2.0


def test_the_machine_is_filled_by_work_whatever_the_prices_are() -> None:
    """2 s of work in 5 s by requests that are dear or cheap beside what they are: a tenth of the time too much."""
    limit = PriceLimit()
    for number in range(100):
        limit.offer(Offer(0.05 * number, 0.055, 1.0 if number % 2 else 0.01, 1.0))
    limit.update(5.0, 1.0, lambda pace_s: (0.0, 0.0))
    assert limit.limit_s == 1.0, "all cheap ones fit, and most of the dear"
    for _ in range(100):
        limit.offer(Offer(5.0, 0.055, 0.02, 1.0))
    limit.update(6.0, 1.0, lambda pace_s: (0.0, 0.0))
    assert limit.limit_s == 0.02


def terciles(fairness: float, requests: int) -> dict[str, float]:
    """Return adherence by output length at three times the machine's capacity, on average of three seeds."""
    load = LoadPoint(21.5, OptionArrivals(WorkloadConfig(num_requests=requests), SCORPIO_8B, 21.5))
    sweep = PolicySweep(
        SCORPIO_8B.machine, [load], ["slack"], SCORPIO_8B.scheduler, {"slack_fairness": fairness}, seeds=3, jobs=1
    )
    return run_sweep(sweep)[0]["terciles"]


@pytest.mark.exhaustive
def test_long_outputs_gain_by_it_and_short_ones_pay() -> None:
    found = {fairness: terciles(fairness, 400) for fairness in (0.0, 0.5, 1.0)}
    long = [terciles["long"] for terciles in found.values()]
    short = [terciles["short"] for terciles in found.values()]
    assert long[0] + 0.04 < long[2] and long == sorted(long), found
    assert short == sorted(short, reverse=True), found


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_fairness_out_of_range(value: float) -> None:
    with pytest.raises(ConfigError, match="slack_fairness must be 0 to 1"):
        scheduler_config(slack_fairness=value)


# --- priority ---------------------------------------------------------------------------------------------------
def nearly_full(limit_s: float) -> State:
    """Return a machine with room for one more row, but none to spare for a request above the price limit.

    They are three tokens ahead, so that a step has time for a prompt.
    """
    policy = SlackPolicy(
        SchedulerConfig(scheduling_policy="slack"),
        SlackOptions(),
        Estimates(CostModel(COST, fit=False), OracleLengths()),
        replace(Tuning(), reserve=0.0),
    )
    made = State(policy)
    policy.state.price.update = lambda *_: False  # type: ignore[method-assign]
    policy.state.price.limit_s = limit_s
    for name in "abc":
        request = made.run(name, tpot_s=0.015)
        request.tokens += [1] * 3
        request.planned = request.computed = len(request.tokens) - 1
    return made


def ask(made: State, name: str, predicted: int, priority: int) -> None:
    made.wait(name, 10, predicted=predicted, priority=priority, ttft_s=5.0, tpot_s=0.015)


def test_a_better_priority_is_worth_some_more_work() -> None:
    """0.10 and 0.12 s of work, a limit of 0.11: the dearer one is served, and the cheaper one waits."""
    made = nearly_full(0.11)
    ask(made, "modest", 90, 2)
    ask(made, "urgent", 110, -2)
    assert list(made.admitted(made.begin())) == ["urgent"]


def test_without_priorities_the_cheaper_one_is_served() -> None:
    made = nearly_full(0.11)
    ask(made, "cheap", 90, 0)
    ask(made, "dear", 110, 0)
    assert list(made.admitted(made.begin())) == ["cheap"]


@pytest.mark.parametrize(("predicted", "served"), [(240, True), (270, False)])
def test_a_priority_buys_ten_levels_of_work_at_most(predicted: int, served: bool) -> None:
    """2.59 times the limit of 0.1 s; 10 ms of it are the prompt."""
    made = nearly_full(0.1)
    ask(made, "urgent", predicted, -(2**40))
    assert list(made.admitted(made.begin())) == (["urgent"] if served else [])


def test_a_worse_priority_costs_as_much() -> None:
    made = nearly_full(0.1)
    ask(made, "batch", 30, 2**40)
    assert not made.admitted(made.begin()), "0.04 s count as 0.104"
