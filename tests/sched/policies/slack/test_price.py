"""Overload under slack: the price of work and of a pace, requests that can wait, margins."""

from math import inf

import pytest

from roseinfer.core.slo import Cause
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.policies.common.ledger import MAX_OBJECTIVE_S, MIN_OBJECTIVE_S
from roseinfer.sched.policies.slack.overload import Offer, PriceLimit
from roseinfer.sched.policies.slack.terms import Margins
from tests.sched.policies.slack.test_blocks import preempt
from tests.sched.policies.slack.test_slack import state
from tests.sched.queues import State

STEP_S = 0.010
# As that of the other tests, but prompts cost next to nothing.
ROWS = CostParams(STEP_S, 1e-9, 0.0, 0.001, 0.0)


def limit(loose: int, strict: int, *, can_wait: bool = False) -> PriceLimit:
    """After 10 s of requests of .1 s of work: `strict` ones that need a step every 20 ms, the others every 100 ms."""
    price = PriceLimit(window_s=10.0)
    for pace_s, count in ((0.100, loose), (0.020, strict)):
        for i in range(count):
            price.offer(Offer(i / count * 10, 0.1, 0.1, pace_s, can_wait))
    assert price.update(10.0, 1.0, lambda pace_s: (STEP_S, 0.0))
    return price


# --- a pace -------------------------------------------------------------------------------------------------------
def test_a_slower_pace_is_held_where_it_serves_clearly_more() -> None:
    """Steps every 20 ms leave half of the 10 s, for 50 requests; every 100 ms leaves 9 s, for 90 of the loose ones."""
    assert limit(loose=200, strict=20).pace_s == 0.100


@pytest.mark.parametrize(("loose", "held_s"), [(40, 0.0), (54, 0.0), (62, 0.100)])
def test_a_tenth_more_is_clear(loose: int, held_s: float) -> None:
    price = limit(loose=loose, strict=150)
    assert (price.pace_s, price.overloaded) == (held_s, True)


def test_any_pace_is_worth_it_while_all_can_be_served() -> None:
    price = limit(loose=20, strict=20)
    assert (price.pace_s, price.limit_s, price.overloaded) == (0.0, inf, False)


def test_a_pace_that_is_too_fast_is_not_worth_it_and_dear_work_neither() -> None:
    price = limit(loose=200, strict=20)
    assert price.objection(0.05, 0.100, can_wait=False) is None
    assert price.objection(0.05, 0.020, can_wait=False) is Cause.PACE
    assert price.objection(0.15, 0.100, can_wait=False) is Cause.PRICE


# --- patience -----------------------------------------------------------------------------------------------------
def test_who_can_wait_does_while_not_all_can_be_served_and_sets_no_price() -> None:
    price = limit(loose=200, strict=0, can_wait=True)
    assert (price.overloaded, price.limit_s, price.load) == (True, inf, 0.0)
    assert price.objection(0.05, 0.100, can_wait=True) is Cause.PRICE
    assert price.objection(0.05, 0.100, can_wait=False) is None


def machine(rows: int, *, offered: float = 0.0, can_wait: bool = False) -> State:
    """Return a machine with `rows` rows of 1 ms, of the 40 that fit a step of 50 ms; one with only a pace waits.

    In the last 5 s, `offered` times the machine's capacity has arrived.
    """
    made = state(ROWS)
    for i in range(60 if offered else 0):
        made.policy.state.price.offer(Offer(i / 12, offered * 4.0 / 60, 0.0, 0.050, can_wait))
    made.now_s = 5.0
    for i in range(rows):
        made.run(f"{i}", tpot_s=0.050)
    made.policy.state.price.update(made.now_s, 1.0, lambda pace_s: (STEP_S, 0.0))
    made.wait("can_wait", 1, tpot_s=0.050)
    return made


def test_a_pace_alone_waits_for_those_that_cannot_although_there_is_room() -> None:
    made = machine(2, offered=1.5)
    made.wait("hasty", 1, ttft_s=9.0, tpot_s=0.050)
    assert list(made.admitted(made.begin())) == ["hasty"]


@pytest.mark.parametrize(("now_s", "starts"), [(5.0, False), (7.0, True)])
def test_a_pace_alone_leaves_room_for_the_others_while_any_come(now_s: float, starts: bool) -> None:
    """Urgent requests of the first 5 seconds take a tenth of the machine. 24 rows take .48 of .8 of it."""
    made = state(ROWS)
    price = made.policy.state.price
    for i in range(60):
        price.offer(Offer(i / 12, 0.1, 0.1, 0.050, can_wait=True))
    for i in range(100):
        price.offer(Offer(4 + i / 100, 0.005, 0.005, 0.050))
    made.now_s = now_s
    for i in range(24):
        made.run(f"{i}", tpot_s=0.050)
    price.update(now_s, 1.0, lambda pace_s: (STEP_S, 0.0))
    made.wait("can_wait", 1, tpot_s=0.050)
    assert ("can_wait" in made.admitted(made.begin())) == starts


@pytest.mark.parametrize(
    ("rows", "offered", "can_wait"),
    [
        pytest.param(2, 1.5, True, id="all that came can wait too"),
        pytest.param(35, 0.1, False, id="all fit"),
        pytest.param(0, 1.5, False, id="the machine is idle"),
    ],
)
def test_else_it_starts(rows: int, offered: float, can_wait: bool) -> None:
    made = machine(rows, offered=offered, can_wait=can_wait)
    assert list(made.admitted(made.begin())) == ["can_wait"]


# --- margins ------------------------------------------------------------------------------------------------------
def test_each_level_of_objectives_has_its_own_margin() -> None:
    margins = Margins()
    for i in range(10):
        margins.observe(0.0299, 0.030, first_s=i, now_s=i + 0.5)
        for _ in range(20):
            margins.observe(0.060, 0.100, first_s=i, now_s=i + 0.5)
    assert margins.of(0.030) == pytest.approx(0.02 + 10 * 0.004), "a few strict among many loose"
    assert margins.of(0.100) == margins.FLOOR
    assert margins.of(0.0305) == margins.of(0.030), "nearly the same objective"
    assert margins.of(0.050) == margins.START


def test_token_deadlines_follow_the_margin_of_their_level() -> None:
    made = state()
    strict, loose = (made.run(f"{tpot_s}", tpot_s=tpot_s) for tpot_s in (0.030, 0.100))
    made.begin()
    for i in range(100):
        made.policy.state.margins.observe(0.0299, 0.030, first_s=i, now_s=i + 0.5)
    made.now_s = 1.0
    made.wait("other", 10, ttft_s=9.0)
    made.begin()
    paces = {track.request: track.pace_s for track in made.policy.state.batch}
    assert paces[strict] == pytest.approx(0.030 * (1 - Margins.CEILING))
    assert paces[loose] == 0.100


def test_no_number_of_objectives_fills_the_memory() -> None:
    margins = Margins()
    for i in range(10_000):
        margins.observe(1.0, MIN_OBJECTIVE_S * (MAX_OBJECTIVE_S / MIN_OBJECTIVE_S) ** (i / 9_999), first_s=i, now_s=i)
    assert len(margins._values) < 400


# --- those that run -----------------------------------------------------------------------------------------------
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


def test_whoever_has_begun_goes_on_at_a_pace_that_is_not_worth_it() -> None:
    made = state()
    made.run("loose", tpot_s=0.100)
    preempted = made.run("strict", tpot_s=0.020)
    preempt(made, preempted)
    made.begin()
    price = made.policy.state.price
    price.pace_s = 0.100
    assert "strict" in made.admitted(made.begin())


def test_other_samples_of_one_that_runs_start_at_its_pace() -> None:
    """Samples cannot be rejected, and without them the request does not end."""
    made = state()
    made.run("loose", tpot_s=0.100)
    made.run("first sample", tpot_s=0.050)
    made.wait("second sample", tpot_s=0.050).fork_of = "first sample"
    made.begin()
    price = made.policy.state.price
    price.pace_s = 0.100
    assert "second sample" in made.admitted(made.begin())
