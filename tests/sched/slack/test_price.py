"""What is asked of a machine that cannot serve all under slack: the price of work and of a pace, patience, margins."""

from math import inf

import pytest

from roseinfer.core.slo import Cause
from roseinfer.sched.cost import CostParams
from roseinfer.sched.policies.slack.capacity import Margins
from roseinfer.sched.policies.slack.price import Offer, PriceLimit
from tests.sched.queues import State
from tests.sched.slack.test_slack import state

STEP_S = 0.010
# As that of the other tests, but prompts cost next to nothing.
ROWS = CostParams(STEP_S, 1e-9, 0.0, 0.001, 0.0)


def limit(loose: int, strict: int, *, patient: bool = False) -> PriceLimit:
    """After 10 s of requests of a second of work: `strict` ones that need a step every 20 ms, others every 100 ms."""
    price = PriceLimit(window_s=10.0)
    for pace_s, count in ((0.100, loose), (0.020, strict)):
        for i in range(count):
            price.offer(Offer(i / count * 10, 1.0, 1.0, pace_s, patient))
    assert price.update(10.0, 1.0, STEP_S)
    return price


# --- a pace -------------------------------------------------------------------------------------------------------
def test_a_slower_pace_is_held_where_it_serves_clearly_more() -> None:
    """Steps every 20 ms leave half of the 10 s, 5 requests; every 100 ms leaves 9 s, for 9 of the loose ones."""
    assert limit(loose=20, strict=2).pace_s == 0.100


def test_the_fastest_is_held_while_it_serves_nearly_as_many() -> None:
    """At 100 ms there are only 5 left to serve: no more than at 20 ms."""
    price = limit(loose=5, strict=15)
    assert (price.pace_s, price.crowded) == (0.0, True)


def test_any_pace_is_worth_it_while_all_can_be_served() -> None:
    price = limit(loose=2, strict=2)
    assert (price.pace_s, price.limit_s, price.crowded) == (0.0, inf, False)


def test_a_pace_that_is_too_fast_is_not_worth_it_and_dear_work_neither() -> None:
    price = limit(loose=20, strict=2)
    assert price.objection(0.5, 0.100, patient=False) is None
    assert price.objection(0.5, 0.020, patient=False) is Cause.PACE
    assert price.objection(1.5, 0.100, patient=False) is Cause.PRICE


# --- patience -----------------------------------------------------------------------------------------------------
def test_who_can_wait_does_while_not_all_can_be_served_and_sets_no_price() -> None:
    price = limit(loose=20, strict=0, patient=True)
    assert (price.crowded, price.limit_s, price.load) == (True, inf, 0.0)
    assert price.objection(0.5, 0.100, patient=True) is Cause.PRICE
    assert price.objection(0.5, 0.100, patient=False) is None


def crowded(**patient: float) -> State:
    """35 of the 40 rows that fit run, and 5/s came, each a tenth of a second of work, half as much again as fits."""
    made = state(ROWS)
    for i in range(60):
        made.policy.state.price.offer(Offer(i / 12, 0.200, 0.200, 0.050))
    made.now_s = 5.0
    for i in range(35):
        made.run(f"{i}", tpot_s=0.050)
    made.wait("patient", 1, tpot_s=0.050)
    made.wait("hasty", 1, ttft_s=9.0, tpot_s=0.050)
    return made


def test_a_pace_alone_waits_while_others_are_crowded() -> None:
    made = crowded()
    assert list(made.admitted(made.begin())) == ["hasty"]
    assert made.policy.state.price.crowded


def test_it_starts_beside_them_when_they_are_not() -> None:
    made = state(ROWS)
    for i in range(35):
        made.run(f"{i}", tpot_s=0.050)
    made.wait("patient", 1, tpot_s=0.050)
    assert list(made.admitted(made.begin())) == ["patient"]


def test_it_starts_on_an_idle_machine_whatever_was_asked_of_it_lately() -> None:
    made = state(ROWS)
    for i in range(60):
        made.policy.state.price.offer(Offer(i / 12, 0.200, 0.200, 0.050))
    made.now_s = 5.0
    made.wait("patient", 1, tpot_s=0.050)
    assert list(made.admitted(made.begin())) == ["patient"]
    assert made.policy.state.price.crowded


# --- margins ------------------------------------------------------------------------------------------------------
def test_each_level_of_objectives_has_its_own_margin() -> None:
    margins = Margins()
    for _ in range(10):
        margins.observe(0.0299, 0.030)
        for _ in range(20):
            margins.observe(0.060, 0.100)
    assert margins.of(0.030) == pytest.approx(0.02 + 10 * 0.004), "a few strict among many loose"
    assert margins.of(0.100) == margins.FLOOR
    assert margins.of(0.0305) == margins.of(0.030), "nearly the same objective"
    assert margins.of(0.050) == margins.START


def test_token_deadlines_follow_the_margin_of_their_level() -> None:
    made = state()
    strict, loose = (made.run(f"{tpot_s}", tpot_s=tpot_s) for tpot_s in (0.030, 0.100))
    made.begin()
    for _ in range(100):
        made.policy.state.margins.observe(0.0299, 0.030)
    made.now_s = 1.0
    made.policy.state.batch.follow_margins()
    paces = {track.request: track.pace_s for track in made.policy.state.batch.tracks}
    assert paces[strict] == pytest.approx(0.030 * (1 - Margins.CEILING))
    assert paces[loose] == 0.100


def test_no_number_of_objectives_fills_the_memory() -> None:
    margins = Margins()
    for i in range(500):
        margins.observe(1.0, 0.001 * 1.1**i)
    assert len(margins._values) <= margins.MOST_LEVELS


# --- those that run -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("pace_s", "demoted"), [(0.0, []), (0.040, ["late"])])
def test_who_is_late_at_a_pace_that_is_not_worth_it_is_demoted(pace_s: float, demoted: list[str]) -> None:
    """It could still catch up, but would hold up more than it is worth."""
    made = state()
    made.run("late", tpot_s=0.030, predicted=100, first_s=-0.1)
    made.run("in time", tpot_s=0.030)
    made.policy.state.price.pace_s = pace_s
    made.begin()
    assert list(made.policy.state.leftover) == demoted


def test_who_is_behind_catches_up_by_others_sitting_out() -> None:
    """30 rows take 40 ms, within the 50 of all. Those that are 200 ms ahead sit out while one of them is behind."""

    def rows(behind_s: float) -> list[str]:
        made = state()
        for i in range(29):
            ahead = made.run(f"{i}", tpot_s=0.050)
            ahead.tokens += [1] * 4
            ahead.planned = ahead.computed = len(ahead.tokens) - 1
        made.run("one", tpot_s=0.050, first_s=-0.050 - behind_s, predicted=1000)
        return made.decode(made.begin())

    assert len(rows(behind_s=0.0)) == 30
    assert "one" in (some := rows(behind_s=0.8)) and len(some) < 30
    assert len(rows(behind_s=1.6)) < len(some)
