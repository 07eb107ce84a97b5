"""Loads that an autoscaled fleet has to follow, with and without objectives."""

from dataclasses import replace
from itertools import pairwise
from math import inf

from roseinfer.core.slo import Slo
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.autoscaling import simulate_fleet
from roseinfer.sim.config import CostConfig
from roseinfer.sim.fleet_plan import AutoscalePlan, FleetPlan, FleetRun
from roseinfer.sim.sweep import EstimatesFactory
from roseinfer.sim.workload import Arrival
from tests.helpers.cases import cases

# A slow machine, so that few steps are a minute: .1 s a step, .2 ms a prompt token. With four seats and outputs of 6
# tokens, an engine ends at most 6 requests a second.
STEP_S, SEATS = 0.100, 4
MACHINE = CostConfig(
    step_ms=1000 * STEP_S,
    token_us=200.0,
    row_us=100.0,
    context_ns=0.0,
    num_kv_blocks=4096,
    enable_prefix_caching=False,
).machine
SLO = Slo(3.0, 0.5)


def load(
    rate: float, seconds: float, slo: Slo | None = None, *, since_s: float = 0.0, prompt: int = 10, output: int = 6
) -> list[Arrival]:
    return [
        Arrival(since_s + number / rate, [1] * prompt, output, slo, predicted_len=output)
        for number in range(int(rate * seconds))
    ]


def run(
    arrivals: list[Arrival], engines: int, policy: str = "slack", *, most: int = 3, patience_s: float = 15.0
) -> FleetRun:
    """Run a fleet of 1 to `most` engines that begins with `engines` and takes 10 s to start one."""
    scaling = AutoscalePlan(1, most, patience_s=patience_s, recent_s=10.0)
    plan = FleetPlan(engines, "pace", start_s=10.0, scaling=scaling)
    config = scheduler_config(scheduling_policy=policy, max_num_seqs=SEATS)
    return simulate_fleet(arrivals, config, MACHINE, plan, EstimatesFactory(MACHINE, "predictor"))


def removals(found: FleetRun) -> list[float]:
    """Return when an engine was removed."""
    return [at_s for (_, before), (at_s, size) in pairwise(found.sizes) if size < before]


def waiting(found: FleetRun, at_s: float) -> int:
    """Return the requests that have waited longer than steps take."""
    return sum(
        life.arrival_s < at_s - 4 * STEP_S and (life.token_s or [inf])[0] > at_s for life in found.simulation.lifetimes
    )


def size_at(found: FleetRun, at_s: float) -> int:
    return [size for since_s, size in found.sizes if since_s <= at_s][-1]


@cases("policy", ["slack"], exhaustive=["fifo"])
def test_an_overloaded_fleet_without_objectives_grows_and_does_not_shrink(policy: str) -> None:
    arrivals = load(20.0, 40.0)
    grown = run(arrivals, 1, policy)
    assert size_at(grown, 40.0) == 3 and not removals(grown)
    assert not removals(run(arrivals, 3, policy))


@cases("share", [2], exhaustive=[1])
def test_a_fleet_with_objectives_on_some_or_all_requests_grows_and_does_not_shrink(share: int) -> None:
    arrivals = [replace(arrival, slo=None if n % share else SLO) for n, arrival in enumerate(load(20.0, 40.0))]
    grown = run(arrivals, 1)
    assert size_at(grown, 40.0) == 3 and not removals(grown)


def test_an_engine_goes_after_an_overload_but_not_while_requests_wait() -> None:
    found = run(load(15.0, 20.0) + load(1.0, 100.0, since_s=20.0), 1, most=2)
    assert size_at(found, 20.0) == 2 and size_at(found, 120.0) == 1
    assert [waiting(found, at_s) for at_s in removals(found)] == [0]


def test_a_burst_adds_engines_only_if_it_lasts() -> None:
    def with_burst(count: int) -> FleetRun:
        burst = load(1000.0, count / 1000, since_s=40.0)
        return run(sorted(load(1.0, 90.0) + burst, key=lambda arrival: arrival.at_s), 1)

    assert with_burst(30).sizes == [(0.0, 1)], "it is over after five seconds"
    lasting = with_burst(200)
    assert size_at(lasting, 60.0) > 1 and all(waiting(lasting, at_s) == 0 for at_s in removals(lasting))


def test_long_prompts_fill_an_engine_though_seats_are_free() -> None:
    """A prompt takes .6 s and more: a rate of 3 keeps two engines busy, so that a third is not too many."""
    assert size_at(run(load(3.0, 40.0, prompt=3000, output=4), 1), 40.0) == 3
    assert not removals(run(load(3.0, 60.0, prompt=3000, output=4), 3))
    assert size_at(run(load(0.3, 60.0, prompt=3000, output=4), 3), 60.0) == 1


@cases("policy", ["slack"], exhaustive=["fifo"])
def test_requests_that_wait_for_the_first_engine_go_to_the_new_ones(policy: str) -> None:
    """They start after 15 s, when 200 requests wait for the first engine, which needs 30 s for these."""
    found = run(load(20.0, 15.0), 1, policy)
    lives = found.simulation.lifetimes
    assert all(life.served and len(life.token_s) == 6 for life in lives)
    assert found.replaced and len(set(found.replaced)) == len(found.replaced), "each moves once"
    assert max(life.ttft_s for life in lives if life.ttft_s is not None) < 16.0
