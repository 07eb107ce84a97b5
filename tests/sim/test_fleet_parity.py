"""A run of several engines, recorded with what the router was told, and replayed: the same plans and placements."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cli import main as cli
from roseinfer.core.errors import ConfigError
from roseinfer.core.promise import Promise
from roseinfer.core.slo import Slo
from roseinfer.engine.record import RecordingCore, engine_recorder
from roseinfer.router.record import RecordingPlacer
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim import engine, fleet
from roseinfer.sim.autoscaling import simulate_fleet
from roseinfer.sim.config import CostConfig
from roseinfer.sim.fleet_plan import FleetPlan, FleetRun, Kill
from roseinfer.sim.parity import fleet_parity_of
from roseinfer.sim.router_replay import replay_placements
from roseinfer.sim.workload import Arrival

MACHINE = CostConfig(step_ms=17.5, token_us=85.0, num_kv_blocks=600, noise=0.05).machine
SLOS = (None, Slo(0.5, 0.03), Slo(2.0, 0.05))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, FleetRun]:
    """Cores and router are those that `serve --record` has; only time and tokens are made up."""
    file = tmp_path / "run"
    names = iter(("0", "1", "2", "1.2"))

    def core(*args: Any, **options: Any) -> RecordingCore:
        return RecordingCore(engine_recorder(f"{file}.{next(names)}"), *args, **options)

    placers: list[RecordingPlacer] = []

    def placer(*args: Any, **options: Any) -> RecordingPlacer:
        placers.append(RecordingPlacer(f"{file}.router", *args, **options))
        return placers[-1]

    monkeypatch.setattr(engine, "EngineCore", core)
    monkeypatch.setattr(fleet, "Placer", placer)
    arrivals = [
        Arrival(0.02 * number, [7 + number % 3] * (200 + 37 * number % 300), 3 + number % 20, SLOS[number % 3])
        for number in range(60)
    ]
    run = simulate_fleet(
        arrivals,
        scheduler_config(scheduling_policy="slack", max_num_seqs=24),
        MACHINE,
        FleetPlan(3, "pace", slow=(1.0, 1.0, 1.5), kills=(Kill(1, 0.5),), start_s=0.2),
        lambda seed: Estimates(),
    )
    placers[0].close()
    return file, run


def test_a_replay_places_and_plans_the_same(
    recorded: tuple[Path, FleetRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = recorded
    parity = fleet_parity_of(str(file))
    assert parity.plans_agree and parity.placements_agree and parity.promises_agree
    (router,) = parity.routers
    assert list(parity.engines) == ["0", "1", "1.2", "2"]
    engines = [where[0] for where in router.recorded if where is not None]
    assert [engines.count(number) for number in range(3)] == [each.placed for each in run.engines]
    assert parity.promises > 30
    assert sum(each.requests for each in parity.engines.values()) == len(router.recorded)
    result = tmp_path / "out.json"
    assert cli.main(["simulate", "--replay", str(file), "--json", str(result)]) == 0
    assert json.loads(result.read_text())["parity"]["placements_agree"] is True
    assert f"placements of {len(router.recorded)} requests: all the same" in capsys.readouterr().out


def test_promises_of_older_files_are_read(recorded: tuple[Path, FleetRun]) -> None:
    file, _ = recorded
    router = Path(f"{file}.router")
    lines = [json.loads(line) for line in router.read_text().splitlines()]
    for line in lines:
        if "promise" in line:
            *cost, expert_s = line["promise"][3]
            line["promise"][3] = cost
            line["promise"].insert(20, expert_s)
    router.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert fleet_parity_of(str(file)).promises_agree


def test_another_decision_or_promise_is_seen(recorded: tuple[Path, FleetRun]) -> None:
    file, _ = recorded
    router = Path(f"{file}.router")
    lines = router.read_text().splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith('{"place"')]
    changed = json.loads(lines[places[10]])
    changed["place"][0] = (changed["place"][0] + 1) % 3
    router.write_text("\n".join([*lines[: places[10]], json.dumps(changed), *lines[places[10] + 1 :]]) + "\n")
    assert replay_placements(router).same == 10
    updates = [number for number, line in enumerate(lines) if line.startswith('{"update":1')]
    changed = json.loads(lines[updates[-3]])
    changed["promise"][6] += 0.01
    router.write_text("\n".join([*lines[: updates[-3]], json.dumps(changed), *lines[updates[-3] + 1 :]]) + "\n")
    parity = fleet_parity_of(str(file))
    assert not parity.promises_agree and parity.promises - parity.promises_same == 1


def test_what_an_engine_says_behind_its_last_step_is_not_said_of_that(recorded: tuple[Path, FleetRun]) -> None:
    """The promise is as of the same time. A router that has not read in between has seen only this one."""
    file, _ = recorded
    router, running = Path(f"{file}.router"), Promise._fields.index("running")
    before = fleet_parity_of(str(file))
    lines = [json.loads(line) for line in router.read_text().splitlines()]
    last = [line for line in lines if line.get("update") == 1 and line["promise"][running]][-3]
    last["promise"][running] = 0
    router.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parity = fleet_parity_of(str(file))
    assert parity.promises_agree and parity.promises == before.promises - 1


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.router"):
        fleet_parity_of(str(tmp_path / "run"))
    (tmp_path / "x.router").write_text("{}\n")
    with pytest.raises(ConfigError, match="not a router's record"):
        replay_placements(tmp_path / "x.router")
