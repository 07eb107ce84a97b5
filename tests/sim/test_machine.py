"""A machine that stalls and that becomes slower, and policies that are not told."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.core.clock import ManualClock
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import HostCopy, Row, StepPlan
from roseinfer.core.runner import ExpertChoice
from roseinfer.priced.machine import Machine, PeriodicStalls, PricedRunner
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.config import CostConfig
from roseinfer.sim.engine import FixedLengthRunner
from roseinfer.sim.simulator import simulate
from roseinfer.sim.workload import Arrival

TENTH = Machine(cost=CostParams(0.1, 1e-9, 0.0, 0.0, 0.0))


def runner_of(machine: Machine, clock: ManualClock) -> PricedRunner:
    return PricedRunner(FixedLengthRunner(), machine, clock)


def steps(machine: Machine, count: int) -> list[float]:
    """Return the times of `count` steps without a pause."""
    clock = ManualClock()
    runner = runner_of(machine, clock)
    found = []
    for number in range(count):
        handle = runner.submit(StepPlan(number, ()))
        found.append(runner.collect(handle).duration_s)
    assert clock.now() == pytest.approx(sum(found))
    return found


def test_a_stall_makes_the_step_that_it_meets_longer_once_in_a_period() -> None:
    found = steps(replace(TENTH, stalls=PeriodicStalls(every_s=5.0, lasts_s=1.0)), 200)
    longer = [number for number, seconds in enumerate(found) if seconds > 0.1 + 1e-9]
    assert all(found[number] == pytest.approx(1.1) for number in longer)
    assert 4 <= len(longer) <= 6, "20 s of steps, with 1 s in 5 lost"
    between = {later - earlier for earlier, later in pairwise(longer)}
    assert between <= {40, 41}


def test_an_idle_machine_is_free_again_when_its_stall_is_over() -> None:
    clock = ManualClock()
    runner = runner_of(replace(TENTH, stalls=PeriodicStalls(every_s=5.0, lasts_s=1.0)), clock)
    clock.advance(500.0)
    assert runner.submit(StepPlan(0, ())).duration_s <= 1.1 + 1e-9


def test_a_slowdown_begins_at_its_time_and_stays() -> None:
    machine = replace(TENTH, slowdown=((1.0, 1.5), (2.5, 1.0)))
    found = steps(machine, 25)
    assert found[:9] == pytest.approx([0.1] * 9)
    assert found[11:18] == pytest.approx([0.15] * 7)
    assert found[22:] == pytest.approx([0.1] * 3)
    assert machine.belief == TENTH.cost, "policies are not told"


@pytest.mark.parametrize("change", [{"stalls": PeriodicStalls(1.0, 0.5)}, {"slowdown": ((0.0, 1.5),)}])
def test_requests_see_it(change) -> None:
    arrivals = [Arrival(0.0, [1] * 10, 30)]
    config = SchedulerConfig(scheduling_policy="fifo")
    plain = simulate(arrivals, config, TENTH)
    slow = simulate(arrivals, config, replace(TENTH, **change))
    assert slow.steps == plain.steps
    assert slow.lifetimes[0].latency_s > 1.3 * plain.lifetimes[0].latency_s
    again = simulate(arrivals, config, replace(TENTH, **change))
    assert again.lifetimes == slow.lifetimes


# --- blocks in host memory ------------------------------------------------------------------------------------------
def test_copies_go_beside_the_rows_and_a_step_lasts_until_both_are_done() -> None:
    machine = Machine(CostParams(0.004, 0.0, 0.0, 0.001, 0.0, load_s=0.001, store_s=0.002), slowdown=((0.1, 2.0),))
    clock = ManualClock(0.0)
    runner = PricedRunner(FixedLengthRunner(), machine, clock)
    row = Row("a:0", 0, 9, 1, 1, False, 9, 0, ())
    copies = [HostCopy(number, number) for number in range(10)]

    def took(rows: list[Row], loads: int, stores: int) -> tuple[float, float, float]:
        handle = runner.submit(StepPlan(0, rows, loads=copies[:loads], stores=copies[:stores]))
        runner.sample(handle)
        began = clock.now()
        result = runner.collect(handle)
        assert clock.now() - began == pytest.approx(result.duration_s)
        return result.duration_s, result.loads_s, result.stores_s

    assert took([row], 0, 0) == pytest.approx((0.005, 0.0, 0.0))
    assert took([row], 4, 2) == pytest.approx((0.005, 0.004, 0.004))
    assert took([row], 10, 4) == pytest.approx((0.010, 0.010, 0.008))
    assert took([], 3, 0) == pytest.approx((0.003, 0.003, 0.0))
    clock.advance(1.0)
    assert took([], 3, 4) == pytest.approx((0.016, 0.006, 0.016))


def test_simulate_takes_what_blocks_cost_and_how_many_there_are(tmp_path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(cost_as_json(CostParams(load_s=1e-6, store_s=2e-6))))
    machine = CostConfig(cost=str(file), store_us=7.0, num_host_blocks=50).machine
    assert (machine.num_host_blocks, machine.cost.load_s, machine.cost.store_s) == (50, 1e-6, 7e-6)
    assert CostConfig().params.load_s == CostParams().load_s and CostConfig().machine.num_host_blocks == 0
    for wrong in ({"num_host_blocks": -1}, {"load_us": -1.0}, {"num_host_blocks": 5, "enable_prefix_caching": False}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            CostConfig(**wrong)


def test_a_model_with_experts_is_described_by_options_or_by_a_file(tmp_path: Path) -> None:
    given = CostConfig(step_ms=1.0, expert_us=50.0, num_experts=64, num_experts_per_tok=4)
    assert (given.params.expert_s, given.params.experts) == (pytest.approx(50e-6), ExpertChoice(64, 4))
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(cost_as_json(given.params)))
    assert CostConfig(cost=str(file)).params == given.params
    argv = ["simulate", "--step-ms", "1", "--expert-us", "50", "--num-experts", "64", "--num-experts-per-tok", "4"]
    assert cli.main([*argv, "--num-requests", "4", "--output-len", "20"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"expert_us": 1.0},
        {"num_experts": 8},
        {"num_experts": 2, "num_experts_per_tok": 3},
        {"num_experts": 8.5, "num_experts_per_tok": 2},
        {"num_experts": 0, "num_experts_per_tok": 0},
    ],
)
def test_half_of_a_description_of_experts_is_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match="expert"):
        CostConfig(**options)
