"""Several engines on simulated time, behind the router that serves."""

import json
import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.cli import main as cli
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.router.registry import ROUTERS
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.arrivals import OptionArrivals
from roseinfer.sim.autoscaling import simulate_fleet
from roseinfer.sim.config import WorkloadConfig
from roseinfer.sim.fleet_plan import FleetPlan, FleetRun, Kill
from roseinfer.sim.report import adherence
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.simulator import simulate
from roseinfer.sim.sweep import EstimatesFactory
from roseinfer.sim.workload import Arrival
from tests.helpers.cases import cases, examples

MACHINE = SCORPIO_8B.machine


def arrivals(count: int, rate: float, seed: int = 0) -> list[Arrival]:
    return list(OptionArrivals(WorkloadConfig(num_requests=count), SCORPIO_8B, rate)(seed))


def short_arrivals(rng: random.Random) -> list[Arrival]:
    slos = [None, Slo(0.3, 0.03), Slo(2.0, 0.05)]
    at_s, found = 0.0, []
    for _ in range(rng.randint(1, 20)):
        at_s += rng.expovariate(20.0)
        found.append(Arrival(at_s, [1] * rng.randint(1, 400), rng.randint(1, 12), rng.choice(slos)))
    return found


def config(policy: str = "slack", **options: object):
    return scheduler_config(scheduling_policy=policy, **{**SCORPIO_8B.scheduler, **options})


def run(
    requests: list[Arrival],
    plan: FleetPlan,
    policy: str = "slack",
    seed: int = 0,
    machine: Machine = MACHINE,
    **options: object,
) -> FleetRun:
    return simulate_fleet(
        requests, config(policy, **options), machine, plan, EstimatesFactory(machine, "predictor"), seed
    )


@cases(("policy", "overlap"), [("slack", False), ("scorpio", True)], exhaustive=[("fifo", False)])
def test_one_engine_behind_a_router_does_what_it_does_alone(policy: str, overlap: bool) -> None:
    requests = arrivals(40, 14.0)
    alone = simulate(
        requests, config(policy, overlap=overlap), MACHINE, estimates=EstimatesFactory(MACHINE, "predictor")(3), seed=3
    )
    found = run(requests, FleetPlan(1, "pace"), policy, seed=3, overlap=overlap)
    fleet, (engine,) = found.simulation, found.engines
    assert (engine.placed, engine.steps, engine.busy_s) == (40, alone.steps, alone.busy_s)
    assert fleet.lifetimes == alone.lifetimes
    assert (fleet.elapsed_s, fleet.kv_peak) == (alone.elapsed_s, alone.kv_peak)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_uses_all_engines(router: str) -> None:
    found = run(arrivals(20, 40.0), FleetPlan(3, router))
    assert sum(engine.placed for engine in found.engines) == 20 + len(found.retries)
    assert router == "pace" or all(engine.placed for engine in found.engines)
    assert all(life.reason is not None for life in found.simulation.lifetimes)


def test_a_slow_engine_gets_less_from_who_sees_it() -> None:
    def slow_share(router: str) -> tuple[float, float]:
        found = run(arrivals(40, 20.0), FleetPlan(2, router, slow=(1.0, 2.0)))
        return found.engines[1].placed / 40, adherence(found.simulation.lifetimes) or 0.0

    (share, kept), (blind_share, blind) = slow_share("pace"), slow_share("round-robin")
    assert blind_share == pytest.approx(0.5, abs=0.1)
    assert share < 0.8 * blind_share
    assert kept > blind


def test_a_promise_does_not_know_the_end_of_its_step() -> None:
    """A request that arrives while the first is computed sees it running, and no other."""
    requests = [Arrival(0.0, [1] * 1000, 50), Arrival(0.001, [1] * 1000, 50)]
    found = run(requests, FleetPlan(2, "least"))
    assert sorted(engine.placed for engine in found.engines) == [1, 1]


# --- deaths -----------------------------------------------------------------------------------------------------
def check_nothing_is_lost(found: FleetRun, requests: list[Arrival]) -> None:
    """Every request ends once, with as many tokens as it should have, in order of time."""
    assert len(found.simulation.lifetimes) == len(requests)
    for number, (life, arrival) in enumerate(zip(found.simulation.lifetimes, requests, strict=True)):
        assert life.reason is not None
        assert all(later > earlier for earlier, later in pairwise([arrival.at_s, *life.token_s]))
        if life.served:
            assert len(life.token_s) == arrival.output_len
        else:
            assert len(life.token_s) < arrival.output_len
            assert (life.reason is FinishReason.ERROR) == (number in found.failed or number in found.unplaced)
    assert sum(engine.placed for engine in found.engines) == (
        len(requests) + len(found.retries) + len(found.replaced) + len(found.resumed) - len(found.unplaced)
    )


def test_who_decodes_on_an_engine_that_dies_goes_on_elsewhere() -> None:
    requests = arrivals(40, 20.0)
    calm = run(requests, FleetPlan(2, "pace"), "fifo")
    found = run(requests, FleetPlan(2, "pace", kills=(Kill(0, 1.0),), start_s=1.0), "fifo")
    check_nothing_is_lost(found, requests)
    assert found.engines[0].deaths == 1
    assert found.resumed and not found.failed
    for number in found.resumed:
        life = found.simulation.lifetimes[number]
        assert life.served
        assert [at_s for at_s in life.token_s if at_s <= 1.0] == [
            at_s for at_s in calm.simulation.lifetimes[number].token_s if at_s <= 1.0
        ]


def test_a_second_death_fails_who_was_resumed_and_nobody_else() -> None:
    requests = [Arrival(0.0, [1] * 10, 200), Arrival(0.9, [1] * 10, 200)]
    kills = (Kill(0, 0.5), Kill(1, 0.6), Kill(0, 1.2))
    found = run(requests, FleetPlan(2, "least", kills=kills, start_s=0.05), "fifo")
    check_nothing_is_lost(found, requests)
    if found.failed == [0]:
        assert found.simulation.lifetimes[1].served


def test_nobody_to_go_to() -> None:
    requests = [Arrival(0.0, [1] * 10, 20), Arrival(0.15, [1] * 10, 20), Arrival(5.0, [1] * 10, 20)]
    found = run(requests, FleetPlan(1, "pace", kills=(Kill(0, 0.1),), start_s=2.0), "fifo")
    assert found.unplaced == [0, 1]
    assert found.simulation.lifetimes[2].served


@examples(40)
@given(
    seed=st.integers(0, 10_000),
    router=st.sampled_from(ROUTERS),
    policy=st.sampled_from(["slack", "fifo"]),
    overlap=st.booleans(),
    start_s=st.sampled_from([0.0, 0.1, 3.0]),
)
def test_nothing_is_lost_or_doubled_when_engines_die_and_come_back(
    seed: int, router: str, policy: str, overlap: bool, start_s: float
) -> None:
    rng = random.Random(seed)
    requests = short_arrivals(rng)
    until_s = requests[-1].at_s + 0.3
    kills = sorted((rng.uniform(0.0, until_s), rng.randrange(3)) for _ in range(rng.randint(0, 8)))
    plan = FleetPlan(3, router, kills=tuple(Kill(engine, at_s) for at_s, engine in kills), start_s=start_s)
    found = run(requests, plan, policy, seed, overlap=overlap)
    check_nothing_is_lost(found, requests)
    again = run(requests, plan, policy, seed, overlap=overlap)
    assert again.simulation == found.simulation and again.engine_of == found.engine_of


# --- the command ------------------------------------------------------------------------------------------------
def command(tmp_path: Path, *args: str) -> dict:
    file = tmp_path / "out.json"
    common = ["simulate", "--setup", "scorpio-8b", "--num-requests", "16", "--jobs", "1", "--json", str(file)]
    assert cli.main([*common, *args]) == 0
    return json.loads(file.read_text())


def test_the_command_compares_routers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = command(
        tmp_path, "--rates", "30", "--replicas", "3", "--router", "least,pace", "--kill", "2@0.7", "--seeds", "2"
    )
    assert [(point["router"], point["replicas"], point["policy"]) for point in found["points"]] == [
        ("least", "3", "slack"),
        ("pace", "3", "slack"),
    ]
    for point in found["points"]:
        fleet = point["fleet"]
        assert fleet["deaths"] == 1
        assert sum(engine["share"] for engine in fleet["engines"].values()) == pytest.approx(1.0)
        assert point["adherence"] == pytest.approx(fmean(point["seeds"]))
    printed = capsys.readouterr().out
    assert "placed for" in printed and "resumed" in printed


def test_the_capacity_of_fleets_is_found(tmp_path: Path) -> None:
    """A prompt takes 110 ms."""
    file, out = tmp_path / "load.toml", tmp_path / "out.json"
    file.write_text("""
        [machine]
        step_ms = 10
        token_us = 1000
        [classes.a]
        ttft_ms = 300
        prompts = { law = "fixed", value = 100 }
        outputs = { law = "fixed", value = 1 }
    """)
    fleet = ["--capacity", "--replicas", "1,3", "--target", "0.9", "--scheduling-policy", "fifo", "--jobs", "1"]
    args = ["simulate", "--workload", str(file), "--requests", "40", *fleet, "--router", "least", "--json", str(out)]
    assert cli.main(args) == 0
    found = json.loads(out.read_text())["capacity"]
    assert [(entry["router"], entry["replicas"]) for entry in found] == [("least", "1"), ("least", "3")]
    assert found[1]["rate"] > 2 * found[0]["rate"]


def test_blocks_of_a_mooncake_trace_are_followed(tmp_path: Path) -> None:
    """Three conversations in turn, each of four blocks of 512 tokens, on two engines that hold all of them."""
    rows: list[dict[str, Any]] = [
        {
            "timestamp": 3000 * number,
            "input_length": 2048 + 8 * number,
            "output_length": 2,
            "hash_ids": [*range(10 * (number % 3), 10 * (number % 3) + 4), 100 + number],
        }
        for number in range(24)
    ]
    trace, out = tmp_path / "mooncake.jsonl", tmp_path / "out.json"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = ["--workload", "trace", "--trace", str(trace), "--trace-lengths", "--scheduling-policy", "slack"]
    fleet = ["--replicas", "2", "--router", "round-robin,prefix-hash,pace", "--jobs", "1", "--json", str(out)]
    assert cli.main(["simulate", *load, *fleet]) == 0
    apart, hashed, paced = (point["fleet"]["prefix_hit_share"] for point in json.loads(out.read_text())["points"])
    tokens = sum(row["input_length"] for row in rows)
    assert apart == pytest.approx(18 * 2048 / tokens), "each conversation is computed once on each engine"
    assert hashed == paced == pytest.approx(21 * 2048 / tokens)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--router", "pace"], "--router needs --replicas"),
        (["--start-s", "3", "--replicas", "2"], "--start-s needs --kill or --autoscale"),
        (["--replicas", "0"], "replicas must be positive"),
        (["--replicas", "two"], "replicas must be whole numbers"),
        (["--replicas", "2", "--router", "magic"], "router: unknown router 'magic'; use pace"),
        (["--replicas", "2", "--slow", "1,1,2"], "slow: 3 are given for 2 engines"),
        (["--replicas", "2,3", "--slow", "1,1"], "slow: 2 are given for 2, 3 engines"),
        (["--replicas", "2", "--kill", "2@3"], "kill: 2@3: engines are 0 to 1"),
        (["--replicas", "2", "--kill", "1"], "kill must be ENGINE@SECONDS"),
        (["--autoscale", "3-2"], "autoscale must be LEAST-MOST"),
        (["--autoscale", "1-2", "--slow", "1,2"], "autoscale and slow cannot be combined"),
        (["--replicas", "2", "--replay", "x"], "replicas cannot be combined with --replay"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [] if "--replay" in args else ["--setup", "scorpio-8b", "--rates", "5"]
    assert cli.main(["simulate", *base, *args]) != 0
    assert named.replace("--", "") in capsys.readouterr().err.replace("--", "")


@pytest.mark.parametrize(
    ("flag", "instead"),
    [("--random-loads", "python -m benchmarks.research.grid"), ("--roles", "docs/research/"), ("--move-us", "--roles")],
)
def test_removed_options_name_their_successor(flag: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", flag, "1"])
    shown = capsys.readouterr().err
    assert f"{flag} was removed: " in shown and instead in shown
