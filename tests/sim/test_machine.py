"""A machine that stalls and that becomes slower, and policies that are not told."""

from dataclasses import replace
from itertools import pairwise

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.config import SchedulerConfig
from roseinfer.core.plan import StepPlan
from roseinfer.priced.machine import Machine, PricedRunner, Stalls
from roseinfer.sched.cost import CostParams
from roseinfer.sim.machine import ExpectedRunner
from roseinfer.sim.simulator import simulate
from roseinfer.sim.workload import Arrival

TENTH = Machine(cost=CostParams(0.1, 1e-9, 0.0, 0.0, 0.0))


def runner_of(machine: Machine, clock: ManualClock) -> PricedRunner:
    return PricedRunner(ExpectedRunner(), machine, clock)


def steps(machine: Machine, count: int) -> list[float]:
    """How long each of `count` steps without a pause takes."""
    clock = ManualClock()
    runner = runner_of(machine, clock)
    found = []
    for number in range(count):
        handle = runner.submit(StepPlan(number, ()))
        found.append(runner.collect(handle).duration_s)
    assert clock.now() == pytest.approx(sum(found))
    return found


def test_a_stall_makes_the_step_that_it_meets_longer_once_in_a_period() -> None:
    found = steps(replace(TENTH, stalls=Stalls(every_s=5.0, lasts_s=1.0)), 200)
    longer = [number for number, seconds in enumerate(found) if seconds > 0.1 + 1e-9]
    assert all(found[number] == pytest.approx(1.1) for number in longer)
    assert 4 <= len(longer) <= 6, "20 s of steps, with 1 s in 5 lost"
    between = {later - earlier for earlier, later in pairwise(longer)}
    assert between <= {40, 41}


def test_an_idle_machine_is_free_again_when_its_stall_is_over() -> None:
    clock = ManualClock()
    runner = runner_of(replace(TENTH, stalls=Stalls(every_s=5.0, lasts_s=1.0)), clock)
    clock.advance(500.0)
    assert runner.submit(StepPlan(0, ())).duration_s <= 1.1 + 1e-9


def test_a_slowdown_begins_at_its_time_and_stays() -> None:
    machine = replace(TENTH, slowdown=((1.0, 1.5), (2.5, 1.0)))
    found = steps(machine, 25)
    assert found[:9] == pytest.approx([0.1] * 9)
    assert found[11:18] == pytest.approx([0.15] * 7)
    assert found[22:] == pytest.approx([0.1] * 3)
    assert machine.belief == TENTH.cost, "policies are not told"


@pytest.mark.parametrize("change", [{"stalls": Stalls(1.0, 0.5)}, {"slowdown": ((0.0, 1.5),)}])
def test_requests_see_it(change) -> None:
    arrivals = [Arrival(0.0, [1] * 10, 30)]
    config = SchedulerConfig(scheduling_policy="fifo")
    plain = simulate(arrivals, config, TENTH)
    slow = simulate(arrivals, config, replace(TENTH, **change))
    assert slow.steps == plain.steps
    assert slow.lifetimes[0].latency_s > 1.3 * plain.lifetimes[0].latency_s
    again = simulate(arrivals, config, replace(TENTH, **change))
    assert again.lifetimes == slow.lifetimes
