"""Fleets whose size follows the load."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.core.slo import Slo
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.autoscaling import Autoscaler, simulate_fleet
from roseinfer.sim.config import CostConfig
from roseinfer.sim.fleet_plan import AutoscalePlan, FleetPlan, FleetRun
from roseinfer.sim.report import longest_below, summarise_fleet
from roseinfer.sim.sweep import EstimatesFactory
from roseinfer.sim.workload import Arrival

MACHINE = CostConfig(
    step_ms=10.0, token_us=1000.0, row_us=100.0, context_ns=0.0, num_kv_blocks=512, enable_prefix_caching=False
).machine
PLAIN = AutoscalePlan(1, 4, patience_s=20.0)


def run(arrivals: list[Arrival], plan: FleetPlan, policy: str = "slack") -> FleetRun:
    config = scheduler_config(scheduling_policy=policy)
    return simulate_fleet(arrivals, config, MACHINE, plan, EstimatesFactory(MACHINE, "predictor"))


# --- size -------------------------------------------------------------------------------------------------------
def looked_at(scaler: Autoscaler, used: float, until_s: int, since_s: int = 0) -> Autoscaler:
    for at_s in range(since_s, until_s + 1, 5):
        scaler.look(at_s, used)
    return scaler


def test_more_engines_when_they_are_full_as_many_as_bring_it_down() -> None:
    assert looked_at(Autoscaler(PLAIN), 0.80, 60).wanted(60, 2, 0) == 2
    assert looked_at(Autoscaler(PLAIN), 0.90, 60).wanted(60, 2, 0) == 3
    assert looked_at(Autoscaler(PLAIN), 1.40, 60).wanted(60, 2, 0) == 4
    assert looked_at(Autoscaler(PLAIN), 9.00, 60).wanted(60, 2, 0) == 4, "no more than there may be"
    assert looked_at(Autoscaler(PLAIN), 0.90, 60).wanted(60, 2, 1) == 3, "it is coming"


def test_more_engines_when_attainable_requests_are_rejected() -> None:
    scaler = looked_at(Autoscaler(PLAIN), 0.5, 60)
    for number in range(100):
        scaler.promised(60.0 + number / 100)
    scaler.rejected(60.5)
    scaler.look(61.0, 0.5)
    assert scaler.wanted(61.0, 2, 0) == 2, "1% is not more than 1%"
    scaler.rejected(60.9)
    assert scaler.wanted(61.0, 2, 0) == 3
    assert scaler.wanted(61.0, 2, 1) == 3, "one is coming: wait for it"
    scaler.look(200.0, 0.5)
    assert scaler.wanted(200.0, 3, 0) == 3, "that was long ago"


def test_what_was_seen_of_fewer_engines_does_not_count() -> None:
    scaler = looked_at(Autoscaler(PLAIN), 1.4, 60)
    scaler.grown()
    scaler.look(61.0, 0.5)
    assert scaler.wanted(61.0, 2, 0) == 2


def test_one_fewer_after_a_while_in_which_the_others_had_been_enough() -> None:
    scaler = looked_at(Autoscaler(PLAIN), 0.4, 60)
    assert scaler.wanted(60.0, 3, 0) == 3
    assert scaler.wanted(79.0, 3, 0) == 3
    assert scaler.wanted(80.0, 3, 0) == 2
    assert scaler.wanted(80.0, 1, 0) == 1, "the least"
    looked_at(scaler, 0.5, 160, 85)
    assert scaler.wanted(160.0, 3, 0) == 3, "the others would be too full"


def test_a_fleet_follows_a_step_in_load_and_comes_back() -> None:
    slo = Slo(0.6, 0.05)
    calm = [Arrival(at_s, [1] * 100, 3, slo) for at_s in range(20)]
    rush = [Arrival(20 + number / 16, [1] * 100, 3, slo) for number in range(16 * 20)]
    after = [Arrival(40 + at_s, [1] * 100, 3, slo) for at_s in range(80)]
    scaling = AutoscalePlan(1, 4, target=0.9, window_s=15.0, patience_s=20.0, recent_s=20.0)
    plan = FleetPlan(1, "pace", start_s=5.0, scaling=scaling)
    found = run(calm + rush + after, plan)
    sizes = [size for _, size in found.sizes]
    assert sizes[0] == 1 and 2 <= max(sizes) < 4 and sizes[-1] == 1
    assert all(at_s >= 20 for at_s, size in found.sizes if size > 1)
    assert all(abs(later - earlier) == 1 for earlier, later in pairwise(sizes) if later < earlier)
    assert all(life.reason is not None for life in found.simulation.lifetimes)
    fleet = summarise_fleet(found, 0.9)["fleet"]
    alone = summarise_fleet(run(calm + rush + after, FleetPlan(1, "pace")), 0.9)["fleet"]
    most = summarise_fleet(run(calm + rush + after, FleetPlan(4, "pace")), 0.9)["fleet"]
    assert alone["replica_s"] < fleet["replica_s"] < 0.8 * most["replica_s"]
    assert most["below_target_s"] < fleet["below_target_s"] < alone["below_target_s"]
    assert alone["below_target_s"] == longest_below(run(calm + rush, FleetPlan(1, "pace")).simulation.lifetimes, 0.9)


def test_the_command_compares_a_fleet_that_is_scaled_with_fixed_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    load = ["--setup", "scorpio-8b", "--num-requests", "30", "--rates", "20", "--jobs", "1", "--json", str(out)]
    assert cli.main(["simulate", *load, "--autoscale", "1-2", "--start-s", "1"]) == 0
    points = json.loads(out.read_text())["points"]
    assert [point["replicas"] for point in points] == ["1-2", "1", "2"]
    assert "s below target" in capsys.readouterr().out
