"""Policies on a machine whose steps read experts: what they plan, and what they promise."""

import random
from dataclasses import replace
from math import inf
from statistics import fmean

import pytest

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.promise import Promise
from roseinfer.core.request import Request
from roseinfer.core.runner import ExpertChoice
from roseinfer.priced.machine import Machine
from roseinfer.router.base import RoutingRequest
from roseinfer.router.view import EngineView
from roseinfer.sched.cost.offline_fit import CostSample, fit_cost
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work, pairs
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import OracleLengths
from roseinfer.sched.policies.common.bursts import MAX_FIXED_SHARE, QUIET_S, BurstBudget
from roseinfer.sched.policies.scorpio import ScorpioOptions, ScorpioPolicy
from roseinfer.sched.policies.slack.demand import Demand
from roseinfer.sched.policies.slack.overload import Offer, PriceLimit
from roseinfer.sched.policies.slack.policy import SlackOptions, SlackPolicy, Tuning
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.engine import SimulatedEngine
from roseinfer.sim.setups import slo_classes
from roseinfer.sim.simulator import add_of, simulate
from roseinfer.sim.workload import Arrival, LogNormalLengths, RequestMix, poisson
from tests.helpers.cases import cases
from tests.sched.queues import State

EXPERTS = ExpertChoice(128, 8)
# Round numbers: 1 ms a step, 1 ms per 16 experts read, 10 us a prompt token or a row.
COST = CostParams(1e-3, 10e-6, 0.0, 10e-6, 0.0, expert_s=62.5e-6, experts=EXPERTS)
DENSE = replace(COST, expert_s=0.0, experts=None)
# Qwen3-30B-A3B in FP8 on a GPU that reads 4.28 TB/s, as far as bytes and launches say.
FP8 = CostParams(1.4e-3, 15e-6, 2e-9, 8e-6, 23e-9, 23e-9, expert_s=53e-6, experts=EXPERTS)
LAW = LogNormalLengths(70, 1.35, 260, 0.85, prompt_min=4, prompt_max=1024, context=2048)


def state(cost: CostParams = COST, **options: int) -> State:
    known = Estimates(CostModel(cost, fit=False), OracleLengths())
    policy = SlackPolicy(SchedulerConfig(), SlackOptions(), known, replace(Tuning(), reserve=0.0))
    policy.state.margins.START = 0.0
    policy.state.length_error = 0.0
    return State(policy, **{"budget": 2048, "seats": 64, "free_blocks": 10_000, **options})


def requests(mix: RequestMix, rate: float, count: int, seed: int = 0) -> list[Arrival]:
    return mix.requests(poisson(rate, count, seed), seed)


def test_a_step_looks_at_each_started_prompt_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price of experts for each of them depends on the tokens of all."""
    made, count = state(), 50
    for i in range(count):
        made.start(made.wait(str(i), 100, ttft_s=60.0, tpot_s=0.2))
    made.wait("waits", 100, ttft_s=60.0, tpot_s=0.2)
    read: list[Request] = []
    remaining = Request.remaining.fget
    assert remaining is not None
    monkeypatch.setattr(Request, "remaining", property(lambda request: read.append(request) or remaining(request)))
    made.begin()
    assert count < len(read) < 20 * count


# --- one step -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "pace_s"), [(1, 0.040), (8, 0.030), (40, 0.020)])
def test_a_chunk_leaves_time_for_the_experts_that_it_adds(rows: int, pace_s: float) -> None:
    made = state(budget=8192)
    for i in range(rows):
        made.run(str(i), tpot_s=pace_s)
    made.wait("long", 4000, ttft_s=9.0, tpot_s=pace_s)
    (tokens,) = made.admitted(made.begin()).values()
    step = Work(tokens, pairs(0, tokens), rows, 0)
    assert COST.seconds(step) <= pace_s * (1 + 1e-9) < COST.seconds(step._replace(prompt_tokens=tokens + 1))


def test_no_time_is_spent_on_experts_for_a_few_tokens() -> None:
    """Experts would take 8 of 20 ms, and a quarter of the prompt 11. Soon the row is far enough ahead for all of it."""
    made = state(budget=8192)
    row = made.run("a", tpot_s=0.020)
    made.wait("long", 4000, ttft_s=9.0, tpot_s=0.020)
    assert made.admitted(made.begin()) == {}
    row.tokens += [1] * 3
    assert made.admitted(made.begin()) == {"long": 4000}


def test_a_second_prompt_of_a_step_needs_hardly_any_more_of_them() -> None:
    made = state(budget=4096)
    made.run("a", tpot_s=0.020)
    for name in "bc":
        made.wait(name, 400, ttft_s=9.0, tpot_s=0.020)
    assert made.admitted(made.begin()) == {"b": 400, "c": 400}, "13 ms in all, and not 19 + 4"


def test_whoever_sits_out_saves_no_more_than_the_experts_that_only_it_needs() -> None:
    """20 rows take 7 ms; down to the 4 ms of the tightest, far fewer may run than 20 * 4 / 7."""
    made = state()
    made.run("tight", tpot_s=0.004)
    for i in range(19):
        made.run(str(i), tpot_s=0.1)
    rows = len(made.decode(made.begin()))
    assert COST.rows_s(rows, 0) <= 0.004 < COST.rows_s(rows + 1, 0)
    assert rows < 10


def test_what_is_made_by_sitting_out_is_not_for_those_that_are_owed_nothing() -> None:
    made = state()
    made.run("tight", tpot_s=0.004)
    for i in range(19):
        made.run(str(i), tpot_s=0.1)
    for i in range(12):
        made.run(f"rest {i}")
    names = made.decode(made.begin())
    assert "tight" in names and COST.rows_s(len(names), 0) <= 0.004 * (1 + 1e-9)


@cases("policy", ["slack"], exhaustive=["qoserve"])
def test_steps_last_as_long_as_the_policy_has_planned(policy: str) -> None:
    """No step is longer than the tightest objective for want of knowing what experts cost."""
    classes = slo_classes((5.0, 12), (5.0, 16))
    machine = Machine(COST, max_model_len=2048, num_blocks=20_000, prefix_caching=False)
    known = Estimates(CostModel(COST, fit=False), OracleLengths())
    engine = SimulatedEngine(scheduler_config(scheduling_policy=policy), machine, estimates=known)
    arrivals = requests(RequestMix(lengths=LAW, classes=classes), 6.0, 40)
    planned, took = [], []
    submit = engine.runner.submit

    def look(plan):
        handle = submit(plan)
        if policy == "slack":
            planned.append(engine.policy._policy._seconds)
        took.append(handle.duration_s)
        return handle

    engine.runner.submit = look
    for number, arrival in enumerate(arrivals):
        while engine.busy and engine.clock.now() < arrival.at_s:
            engine.step()
        engine.wake(arrival.at_s)
        engine.add(add_of(arrival, str(number), 2048), arrival.output_len)
    while engine.busy:
        engine.step()
    assert len(took) > 500
    if policy == "slack":
        near = [abs(said / seconds - 1) < 0.03 for said, seconds in zip(planned, took, strict=True)]
        assert fmean(near) > 0.98
    assert fmean(seconds <= 0.013 for seconds in took) > 0.9


# --- the long run ---------------------------------------------------------------------------------------------------
def test_demand_is_full_where_a_step_of_the_rows_takes_their_pace() -> None:
    for pace_s in (0.004, 0.007, 0.0095):
        most = max(n for n in range(500) if COST.rows_s(n, 0) <= pace_s)
        each = COST.row_s / pace_s
        full, more = (Demand.of([(0.0, each, pace_s)] * n, pace_s, experts=True) for n in (most, most + 1))
        assert full.fits(1.0, 1.0, COST) and not more.fits(1.0, 1.0, COST)


def test_demand_counts_one_more_as_it_counts_all() -> None:
    pace_s = 0.007
    grown = Demand.of([], pace_s, experts=True)
    for _ in range(12):
        grown = grown.with_one(COST.row_s / pace_s, pace_s, 0.0, inf)
    whole = Demand.of([(0.0, COST.row_s / pace_s, pace_s)] * 12, pace_s, experts=True)
    for seconds in (0.01, 0.1, 1.0):
        assert grown.taken_s(seconds, COST) == pytest.approx(whole.taken_s(seconds, COST))


def test_rows_that_are_ahead_by_no_more_than_their_pace_leave_prompts_no_time_of_it() -> None:
    """They need a step in each pace all the same; of what is left for prompts, an error of 5% would be half."""
    pace_s, rows = 0.0095, 60
    demand = Demand.of([(pace_s, COST.row_s / pace_s, pace_s)] * rows, pace_s, experts=True)
    for seconds in (0.05, 0.1, 0.3):
        assert demand.taken_s(seconds, COST) == pytest.approx(seconds * COST.rows_s(rows, 0) / pace_s)


def test_the_paces_are_compared_by_what_a_full_machine_does_at_each() -> None:
    """Requests of 100 tokens: 5 rows fill 4 ms, which is 12 a second; 100 rows fill 10 ms, which is 100."""
    price = PriceLimit(window_s=10.0)
    for i in range(600):
        pace_s = 0.004 if i % 2 else 0.010
        price.offer(Offer(i / 60, 100 * COST.row_s, 100 * COST.row_s, pace_s, False, 100.0))
    assert price.update(10.0, 1.0, lambda pace_s: COST.cost_tangent(pace_s, 0.0))
    assert price.overloaded and price.pace_s == 0.010


def test_a_prompt_alone_is_judged_with_all_the_experts_that_it_reads() -> None:
    made = state()
    made.wait("late", 100, ttft_s=0.0095)  # 1 ms, 1 ms for the tokens and 8 ms for the experts
    assert made.rejected(made.begin())["late"].reason == "ttft"
    made = state()
    made.wait("in time", 100, ttft_s=0.011)
    assert made.admitted(made.begin()) == {"in time": 100}


def attained(known: CostParams, mix: RequestMix, rate: float, count: int = 60) -> tuple[float, float]:
    """Shares that are good, and that were accepted in vain."""
    arrivals = [replace(each, predicted_len=None) for each in requests(mix, rate, count, seed=1)]
    machine = Machine(FP8, noise=0.03, max_model_len=2048, num_blocks=20_000, prefix_caching=False)
    estimates = Estimates(cost=CostModel(known))
    found = simulate(arrivals, scheduler_config(scheduling_policy="slack"), machine, estimates=estimates).lifetimes
    return fmean(life.good for life in found), fmean(life.served and not life.good for life in found)


def test_promises_are_kept_that_a_line_in_the_rows_breaks() -> None:
    """At paces that few rows fit, calibrated for it and learning all the time, with and without the experts."""
    rng, rows = random.Random(0), [2**i for i in range(8)]
    works = [Work(rng.choice([0, 0, 64, 512]), 0.0, n, 500 * n) for n in rows for _ in range(6)]
    line = fit_cost([CostSample(work, FP8.seconds(work)) for work in works]).params
    mix = RequestMix(lengths=LAW, classes=slo_classes((0.13, 4), (0.8, 4), (0.27, 20)))
    good, missed = attained(FP8, mix, 3.5)
    good_by_line, missed_by_line = attained(line, mix, 3.5)
    assert good > 0.9 and missed < 0.01
    assert good > good_by_line + 0.05 and missed_by_line > 0.05


@cases("rate", [20.0], exhaustive=[12.0])
def test_who_is_let_start_beside_slower_paces_under_overload_keeps_its_own(rate: float) -> None:
    """Running requests fit 4 ms only while rows of the slower class are skipped, and few can be served at that pace."""
    mix = RequestMix(lengths=LAW, classes=slo_classes((0.13, 4), (0.8, 4), (0.27, 20)))
    good, missed = attained(FP8, mix, rate, 100)
    assert good > 0.25 and missed < 0.03


# --- others ---------------------------------------------------------------------------------------------------------
def test_scorpio_estimates_a_step_with_its_experts() -> None:
    known = Estimates(CostModel(COST, fit=False), OracleLengths())
    policy = ScorpioPolicy(SchedulerConfig(), ScorpioOptions(scorpio_eps=1.0), known)
    assert policy.estimate(8, 100.0, 50.0) == pytest.approx(COST.rows_s(8, 0))


def test_a_burst_pays_for_longer_steps_where_each_reads_all_experts() -> None:
    """1 ms a step and 8 for experts are a tenth of 90 ms; 1 ms is less than a tenth of an ordinary step."""
    for cost, tokens in ((COST, (1 / MAX_FIXED_SHARE - 1) * 9e-3 / 10e-6), (DENSE, 2048)):
        config = scheduler_config(max_num_batched_tokens=2048, slack_burst_tokens=60_000)
        model = CostModel(cost, fit=False)
        model.steps = 100
        bursts, made = BurstBudget(config, SlackOptions(), model), state(cost, budget=2048, free_blocks=100_000)
        made.now_s = QUIET_S
        for number in range(40):
            made.wait(str(number), 2000)
        assert bursts.widen(made.view(), promised=False).token_budget == pytest.approx(tokens, abs=1)


def test_a_router_is_told_what_steps_cost_with_the_experts_that_they_read_now() -> None:
    made = state()
    for number in range(8):
        made.run(str(number), tpot_s=0.020)
    made.begin()
    found = made.policy.promise(Promise(0.0, running=8, free_seats=100_000), 16, lambda request: 0)
    assert found.experts == pytest.approx(EXPERTS.read(8)) and found.cost.expert_s == COST.expert_s
    assert found.constant_s == pytest.approx(COST.rows_s(8, 0) - 8 * COST.row_s)
    views = [EngineView(0, 1000, 1, 0.0) for _ in range(2)]
    for view, promise in zip(views, (found, found._replace(experts=0.0)), strict=True):
        view.update(promise)
    ask = RoutingRequest(100, output_tokens=10, ttft_left_s=1.0, tpot_s=0.020)
    full, bare = (view.forecast(ask, 0.0, 0).utilisation for view in views)
    assert full - bare == pytest.approx(EXPERTS.read(8) * COST.expert_s / 0.020 / found.usable_share)
