"""The slack policy: hand-made states, then plans through the scheduler."""

import random
from dataclasses import replace
from math import inf

import pytest

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import LengthEstimator, OracleLengths, peak_tokens
from roseinfer.sched.policies.slack.demand import Demand
from roseinfer.sched.policies.slack.overload import Offer, PriceLimit
from roseinfer.sched.policies.slack.policy import SlackOptions, SlackPolicy, Tuning
from roseinfer.sched.policies.slack.terms import Margins
from roseinfer.sched.policy import Ended, Queued
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.simulator import simulate
from roseinfer.sim.workload import Arrival, poisson
from tests.helpers.engines import add, make_core, run_dry, submitted
from tests.sched.queues import State

# 10 ms a step, 1 ms a prompt token, 1 ms a decoding request.
COST = CostParams(step_s=0.010, token_s=0.001, pair_s=0.0, row_s=0.001, context_s=0.0)


def state(
    cost: CostParams = COST,
    *,
    lengths: LengthEstimator | None = None,
    budget: int = 2048,
    seats: int = 64,
    free_blocks: int = 10_000,
    **tuning: float,
) -> State:
    """Make a policy without margins, reserve and length errors, so that expected values equal the objectives."""
    config = SchedulerConfig(scheduling_policy="slack")
    known = Estimates(CostModel(cost, fit=False), lengths or OracleLengths())
    policy = SlackPolicy(config, SlackOptions(), known, replace(Tuning(), **{"reserve": 0.0, **tuning}))
    policy.state.margins.START = 0.0
    policy.state.length_error = 0.0
    return State(policy, budget=budget, seats=seats, free_blocks=free_blocks)


# --- the length of a step ---------------------------------------------------------------------------------------
def test_prompts_get_what_the_smallest_slack_leaves() -> None:
    made = state()
    made.run("a", tpot_s=0.050)
    made.wait("long", 500, ttft_s=9.0, tpot_s=0.050)
    decision = made.begin()
    assert made.admitted(decision) == {"long": 39}, "50 ms, less 10 for the step and 1 for the row"
    assert made.decode(decision) == ["a"]


def test_tokens_ahead_of_schedule_pay_for_a_longer_step() -> None:
    made = state()
    first = made.run("a", tpot_s=0.050)
    first.tokens += [1, 1]
    first.planned = first.computed = len(first.tokens) - 1
    made.wait("long", 500, ttft_s=9.0, tpot_s=0.050)
    assert made.admitted(made.begin()) == {"long": 139}


def test_the_margin_brings_deadlines_forward() -> None:
    made = state()
    made.policy.state.margins.START = 0.11
    made.run("a", tpot_s=0.050)
    made.wait("long", 500, ttft_s=9.0, tpot_s=0.050)
    assert made.admitted(made.begin()) == {"long": 33}, "44.5 ms, less 11"


def test_an_idle_machine_gives_a_prompt_the_whole_step() -> None:
    made = state()
    made.wait("long", 500, ttft_s=9.0, tpot_s=0.050)
    assert made.admitted(made.begin()) == {"long": 500}


def test_requests_well_ahead_sit_out_only_under_pressure_and_not_for_long() -> None:
    made = state()
    made.run("tight", tpot_s=0.030)
    loose = made.run("loose", tpot_s=0.100)
    loose.tokens += [1] * 20
    loose.planned = loose.computed = len(loose.tokens) - 1
    assert made.decode(made.begin()) == ["loose", "tight"], "nobody waits"
    made.wait("long", 5000, ttft_s=9.0, tpot_s=0.100)
    turns = []
    for _ in range(30):
        made.now_s += 0.030
        turns.append("loose" in made.decode(made.begin()))
    assert turns.count(False) > 15
    gaps = "".join("x" if turn else "." for turn in turns).split("x")
    assert max(map(len, gaps)) * 0.030 <= 4 * 0.100


# --- who is demoted, turned away, admitted ----------------------------------------------------------------------
def test_who_cannot_catch_up_is_demoted_and_served_from_what_is_left() -> None:
    made = state()
    made.run("lost", tpot_s=0.030, predicted=3, first_s=-1.0)
    made.run("fine", tpot_s=0.030)
    assert made.decode(made.begin()) == ["fine", "lost"], "there is room for both"
    assert list(made.policy.state.unpromised) == ["lost"]
    busy = [made.run(f"busy{i}", tpot_s=0.030) for i in range(25)]
    assert "lost" not in made.decode(made.begin())
    assert len(busy) == 25


def test_who_is_late_but_can_catch_up_stays() -> None:
    made = state()
    made.run("late", tpot_s=0.030, predicted=100, first_s=-0.1)
    made.begin()
    assert not made.policy.state.unpromised


def test_a_prompt_that_cannot_be_in_time_is_turned_away_with_a_prediction() -> None:
    made = state()
    made.run("a", tpot_s=0.050)
    made.wait("late", 500, ttft_s=0.1, tpot_s=0.050)
    found = made.rejected(made.begin())
    assert found["late"].predicted_ttft_s == pytest.approx(0.510)
    assert found["late"].hopeless
    assert found["late"].reason == "ttft"


def test_a_pace_that_no_step_can_keep_is_refused_and_never_sets_the_pace_of_others() -> None:
    made = state()
    made.policy.state.cost.steps = 50
    made.run("a", tpot_s=0.050)
    made.wait("b", 500, ttft_s=9.0, tpot_s=0.005)
    found = made.rejected(made.begin())
    assert (found["b"].reason, found["b"].hopeless) == ("tpot", True)
    made.run("c", tpot_s=0.005)
    made.begin()
    assert list(made.policy.state.unpromised) == ["c"]
    assert made.policy.state.batch.smallest_s == 0.050


def test_prompts_without_objectives_come_behind_those_with_some_until_they_have_waited_long() -> None:
    made = state(budget=600)
    made.start(made.wait("free", 5000))
    made.wait("promised", 500, ttft_s=60.0, tpot_s=0.050)
    decision = made.begin()
    assert made.admitted(decision) == {"promised": 500}
    assert decision.chunk(made.running[0], 600) == 100
    made.now_s = 10.0
    decision = made.begin()
    assert (made.admitted(decision), decision.chunk(made.running[0], 600)) == ({"promised": 500}, 60), "a tenth"


def test_requests_without_objectives_start_while_there_is_room_and_none_starves() -> None:
    made = state()
    made.wait("early", 10)
    made.wait("too", 10)
    made.now_s = 9.0
    for i in range(30):
        made.run(f"busy{i}", tpot_s=0.050)
    made.wait("late", 10)
    assert made.admitted(made.begin()) == {}, "40 of 50 ms are taken"
    ahead(made, 10.0)
    assert list(made.admitted(made.begin())) == ["early"], "one that waited long"
    early = next(request for request in made.waiting if request.request_id == "early")
    made.start(early)
    early.planned = 1
    assert made.admitted(made.begin()) == {}, "one a second"
    ahead(made, 11.0)
    assert list(made.admitted(made.begin())) == ["too"]


def ahead(made: State, now_s: float) -> None:
    """Time goes on, and all that decode have half a second to spare, so that there is room for prompts."""
    made.now_s = now_s
    for request in made.running:
        if request.slo is not None:
            request.tokens += [1] * (request.prompt_len + round((now_s - 8.5) / 0.050) - len(request.tokens))
            request.planned = request.computed = len(request.tokens) - 1


def test_an_old_prompt_without_objectives_does_not_keep_an_urgent_one_from_being_guarded() -> None:
    made = state()
    made.start(made.wait("old", 500))
    made.now_s = 15.0
    for i in range(30):
        made.run(f"busy{i}", tpot_s=0.042)
    made.start(made.wait("urgent", 40, ttft_s=0.2, tpot_s=0.042))
    decision = made.begin()
    chunks = [decision.chunk(made.running[at], 500) for at in (0, -1)]
    assert chunks == [16, 28], "a little for the old one, and the rest of a longer step for the urgent one"


def test_an_old_prompt_without_objectives_gets_a_little_though_there_is_room_for_none() -> None:
    made = state()
    made.start(made.wait("old", 500))
    made.now_s = 15.0
    for i in range(30):
        made.run(f"busy{i}", tpot_s=0.041)
    made.start(made.wait("not urgent", 40, ttft_s=9.0, tpot_s=0.041))
    decision = made.begin()
    assert [decision.chunk(made.running[at], 500) for at in (0, -1)] == [16, 0]


def test_requests_without_objectives_start_at_once_beside_few_others() -> None:
    made = state()
    made.run("busy", tpot_s=0.050)
    made.wait("free", 10)
    made.wait("also", 10)
    assert sorted(made.admitted(made.begin())) == ["also", "free"]


def test_what_has_begun_is_never_turned_away() -> None:
    made = state()
    made.start(made.wait("begun", 500, ttft_s=0.1, tpot_s=0.050))
    made.now_s = 5.0
    decision = made.begin()
    assert made.rejected(decision) == {}
    assert decision.chunk(made.running[0], 500) == 500


def test_admission_stops_at_what_the_machine_can_keep_up_with() -> None:
    """A row costs 1 ms of each 50: with 10 ms of overhead there is room for 39 beside the first, prompts aside."""
    made = state(CostParams(0.010, 1e-9, 0.0, 0.001, 0.0), looked_at=64)
    for i in range(100):
        made.wait(f"{i}", 1, ttft_s=9.0, tpot_s=0.050)
    assert 39 <= len(made.admitted(made.begin())) <= 40


def test_slack_that_runs_have_banked_admits_more() -> None:
    def admitted(tokens_ahead: int) -> int:
        made = state(CostParams(0.010, 1e-9, 0.0, 0.001, 0.0), looked_at=64)
        for i in range(30):
            ahead = made.run(f"run{i}", tpot_s=0.050)
            ahead.tokens += [1] * tokens_ahead
            ahead.planned = ahead.computed = len(ahead.tokens) - 1
        for i in range(50):
            made.wait(f"{i}", 1, ttft_s=9.0, tpot_s=0.050)
        return len(made.admitted(made.begin()))

    assert admitted(0) == 10
    assert admitted(100) >= 15


def test_cheap_requests_overtake_expensive_ones() -> None:
    made = state(seats=1)
    made.wait("long", 50, predicted=900, ttft_s=2.0, tpot_s=0.050)
    made.wait("short", 50, predicted=9, ttft_s=2.5, tpot_s=0.050)
    assert list(made.admitted(made.begin())) == ["short"]


def test_priority_comes_before_the_deadline() -> None:
    made = state(seats=1)
    made.wait("a", 50, ttft_s=2.0, tpot_s=0.050)
    second = made.wait("b", 50, ttft_s=2.5, tpot_s=0.050)
    second.priority = -1
    made.policy.observe(Ended("b", 0.0, FinishReason.ABORT, 0))
    made.waiting.remove(second)
    made.waiting.append(second)
    made.policy.observe(Queued(second))
    assert list(made.admitted(made.begin())) == ["b"]


def test_blocks_are_taken_from_those_that_are_owed_nothing_then_from_those_furthest_ahead() -> None:
    made = state()
    made.run("near", tpot_s=0.030)
    far = made.run("far", tpot_s=0.100)
    free = made.run("free")
    decision = made.begin()
    assert decision.victim(made.running) is free
    made.running.remove(free)
    assert decision.victim(made.running) is far


def test_the_cache_must_hold_the_expected_peak() -> None:
    def admitted(free_blocks: int) -> list[str]:
        made = state(free_blocks=free_blocks, cost_weight=0.0)
        made.run("old", 160, predicted=161, tpot_s=0.050)
        made.wait("new", 160, predicted=320, ttft_s=9.0, tpot_s=0.050)
        return list(made.admitted(made.begin()))

    assert admitted(30) == [], "when the old one leaves, both hold 160 + 160 tokens each, and one more"
    assert admitted(31) == ["new"]


def test_a_tenant_beyond_its_share_waits_behind_others() -> None:
    made = state(seats=1)
    for i in range(4):
        made.run(f"greedy{i}", tpot_s=0.050, tenant="greedy")
    made.run("modest", tpot_s=0.050, tenant="modest")
    made.wait("a", 10, ttft_s=2.0, tpot_s=0.050, tenant="greedy")
    made.wait("b", 10, ttft_s=2.5, tpot_s=0.050, tenant="modest")
    assert list(made.admitted(made.begin())) == ["b"]


# --- parts ------------------------------------------------------------------------------------------------------
def peak(demand: Demand) -> float:
    """Return the largest share of the machine that it needs, steps apart: the limit from which on it fits."""
    free = CostParams(0.0, 0.001, 0.0, 0.001, 0.0)
    return next(limit / 1e4 for limit in range(20_000) if demand.fits(limit / 1e4, 1.0, free))


def test_demand_counts_nothing_before_slack_is_used_up() -> None:
    demand = Demand.of([(0.0, 0.1, 1.0), (4.0, 0.2, 1.0)], 1 / 32)
    arriving = Demand.of([(0.0, 0.1, 1.0)], 1 / 32, 0.2)
    found = {
        0.1 + 0.2 * (1 - 4.0 / 16.0): demand,
        0.1 + 0.2 * (1 - 4.0 / 16.0) + 0.3: demand.with_one(0.3, 1.0, 0.0, 0.1),
        0.1 + 0.25 / 0.5: demand.with_one(0.0, 1.0, 0.25, 0.1),  # due within the first horizon
        0.1 + 0.2 * (1 - 4.0 / 16.0) + 0.25 / 16: demand.with_one(0.0, 1.0, 0.25, 16.0),  # there is time
        0.1 + 0.2: arriving,
        0.1 + 0.2 + 1e-9: arriving.with_one(0.0, 1.0, 0.025, 0.1),  # part of what was to be expected
        0.1 + 0.5 + 0.1: arriving.with_one(0.0, 1.0, 0.25, 0.1),
    }
    for share, made in found.items():
        assert peak(made) == pytest.approx(share, abs=2e-4)


def test_steps_are_needed_less_often_while_the_one_that_needs_most_is_ahead() -> None:
    """A step of 10 ms every 20, and rows that take a tenth: .6 of the machine, and less if there is slack."""
    tight, ahead = (Demand.of([(slack, 0.0, 0.020)], 1 / 32) for slack in (0.0, 32.0))
    assert not tight.with_one(0.1, 1.0, 0.0, 0.1).fits(1.0, 0.59, COST)
    assert tight.with_one(0.1, 1.0, 0.0, 0.1).fits(1.0, 0.61, COST)
    assert ahead.with_one(0.1, 1.0, 0.0, 0.1).fits(1.0, 0.30, COST)
    assert not ahead.with_one(0.1, 0.020, 0.0, 0.1).fits(1.0, 0.59, COST), "the new one needs its own"
    assert tight.taken_s(1.0, COST) == pytest.approx(0.5)
    assert ahead.taken_s(1.0, COST) < 0.1


def test_steps_are_counted_by_the_objective_since_the_margin_is_not_kept_anyway() -> None:
    made = state(CostParams(0.010, 0.001, 0.0, 0.0, 0.0))
    made.policy.state.margins.START = 0.11
    made.run("a", tpot_s=0.050)
    made.begin()
    assert made.policy.state.demand.taken_s(25.0, COST) / 25.0 == pytest.approx(0.010 / 0.050, rel=0.01)


def offered(works_s: list[float]) -> PriceLimit:
    """Ten seconds of requests, a tenth of a second apart."""
    price = PriceLimit(window_s=10.0)
    for i in range(100):
        work_s = works_s[i % len(works_s)]
        price.offer(Offer(i / 10, work_s, work_s, inf))
    return price


def test_the_price_limit_is_where_the_cheapest_fill_the_machine() -> None:
    price = offered([0.01 * (1 + i) for i in range(10)])
    assert price.update(10.0, 0.60, lambda pace_s: (0.0, 0.0))
    assert price.limit_s == inf, "5.5 s of work in 10 s fit"
    assert not price.update(10.4, 0.30, lambda pace_s: (0.0, 0.0)), "twice a second"
    assert price.update(11.0, 0.30, lambda pace_s: (0.0, 0.0))
    assert price.limit_s == pytest.approx(0.08)
    assert price.update(30.0, 0.30, lambda pace_s: (0.0, 0.0))
    assert price.limit_s == inf, "what was offered long ago does not count"


def test_a_tenant_with_a_higher_price_does_not_leave_the_machine_idle() -> None:
    """Work at its plain price fills the machine; the limit is the price up to which it does."""
    price = PriceLimit(window_s=10.0)
    for i in range(100):
        price.offer(Offer(i / 10, 0.1, 0.1 * (3 if i % 2 else 1), inf))
    assert price.update(10.0, 0.75, lambda pace_s: (0.0, 0.0))
    assert price.limit_s == pytest.approx(0.3), "5 s of the cheap, and half of the others"


def test_the_peak_of_the_cache() -> None:
    """Worked by hand: after 2 tokens the last leaves; then 5 + 2 + 4 + 2 + 3 + 2 are held."""
    assert peak_tokens([(5.0, 9.0), (4.0, 4.0), (3.0, 2.0)]) == max(5 + 9, 5 + 4 + 2 * 4, 5 + 4 + 3 + 3 * 2)
    assert peak_tokens([]) == 0.0


def test_the_margin_settles_where_one_in_twenty_one_is_near() -> None:
    margins = Margins()
    for i in range(30):
        margins.observe(0.0299, 0.030, first_s=i, now_s=i + 0.5)
    assert margins.of(0.030) == pytest.approx(0.02 + 30 * 0.004)
    for _ in range(20):
        margins.observe(0.020, 0.030, first_s=30.0, now_s=31.0)
    assert margins.of(0.030) == pytest.approx(0.02 + 30 * 0.004 - 0.004)
    for _ in range(2000):
        margins.observe(0.020, 0.030, first_s=30.0, now_s=31.0)
    assert margins.of(0.030) == margins.FLOOR


def test_requests_that_run_at_the_same_time_add_little_to_the_margin() -> None:
    """They may all be late for one reason. Only one that began since tells whether the new margin suffices."""
    margins = Margins()
    for i in range(40):
        margins.observe(0.040, 0.030, first_s=i / 10, now_s=4.0 + i / 10)
    assert margins.of(0.030) == pytest.approx(0.02 + 0.015)
    for _ in range(40):
        margins.observe(0.040, 0.030, first_s=4.1, now_s=9.0)
    assert margins.of(0.030) == pytest.approx(0.02 + 2 * 0.015)


def test_a_machine_that_becomes_slower_serves_as_many_as_it_can() -> None:
    """Steps take 25 ms instead of 19, and the TPOT is 30 ms. All that decode then are late, for one reason.

    A margin of 15% would leave time for hardly more than one request at a time.
    """
    arrivals = [Arrival(i / 7, [1] * 50, 260, Slo(tpot_s=0.030)) for i in range(400)]
    cost = CostParams(step_s=0.019, token_s=1e-5, row_s=1e-4, context_s=0.0)
    machine = Machine(cost, noise=0.1, slowdown=((20.0, 1.3),))
    found = simulate(arrivals, scheduler_config(scheduling_policy="slack"), machine)
    assert found.elapsed_s < 200
    assert sum(life.good for life in found.lifetimes) > 370


# --- whole runs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [1, 2])
def test_without_objectives_the_plans_are_those_of_fifo(depth: int) -> None:
    rng = random.Random(depth)
    jobs = [([rng.randrange(50) for _ in range(rng.randrange(1, 40))], rng.randrange(1, 20)) for _ in range(40)]

    def plans(policy: str) -> list[object]:
        core = make_core(scheduling_policy=policy, depth=depth, num_blocks=48)
        for i, (prompt, length) in enumerate(jobs):
            add(core, str(i), prompt, max_tokens=length)
            if i % 3 == 0:
                core.step()
        run_dry(core)
        return submitted(core)

    assert plans("slack") == plans("fifo")


@pytest.mark.exhaustive
def test_best_effort_is_served_under_a_steady_overload_of_objectives() -> None:
    arrivals = SCORPIO_8B.mix.requests(poisson(15.0, 300, 0), 0)
    arrivals += [Arrival(at_s, [1] * 50, 20) for at_s in (5.0, 10.0, 15.0)]
    arrivals.sort(key=lambda arrival: arrival.at_s)
    config = scheduler_config(scheduling_policy="slack", **SCORPIO_8B.scheduler)
    lives = simulate(arrivals, config, SCORPIO_8B.machine).lifetimes
    free = [life for life in lives if life.slo is None]
    assert sum(life.reason is FinishReason.REJECTED for life in lives) > 20, "there is an overload"
    assert all(life.served for life in free)
    assert max(life.ttft_s for life in free) < 15.0
    assert max(b - a for life in free for a, b in zip(life.token_s, life.token_s[1:], strict=False)) < 1.5


def test_an_objective_for_the_whole_request_is_kept() -> None:
    slo = Slo(e2e_s=4.0)
    arrivals = [Arrival(i * 0.1, [1] * 50, 100, slo, 100) for i in range(40)]
    config = scheduler_config(scheduling_policy="slack", **SCORPIO_8B.scheduler)
    lives = simulate(arrivals, config, SCORPIO_8B.machine).lifetimes
    assert all(life.good for life in lives)
