"""Evaluation of policies on random loads."""

import json
from math import inf
from pathlib import Path

import pytest

from benchmarks.research import cache, evaluation, grid, random_loads
from benchmarks.research.choices import draw_choices, space
from benchmarks.research.evaluation import (
    Grid,
    check_grid,
    evaluate_load,
    outcome_of,
    pooled_late,
    ratio,
    run_grid,
    summary_of,
)
from roseinfer.core.errors import ConfigError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Slo
from roseinfer.sim.simulator import Lifetime, SimulationResult

SMALL = {**space(), "requests": 16, "long_requests": 10}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use loads of 16 requests."""
    monkeypatch.setattr(random_loads, "space", lambda: SMALL)


def grid_of(**changes: object) -> Grid:
    return Grid(**{"seed": 2, "count": 3, "policies": ("fifo", "sarathi", "scorpio-tuned"), **changes})


def test_loads_are_judged_worst_first_and_those_without_their_trace_are_named() -> None:
    found = run_grid(grid_of())
    ratios = [entry["ratio"] for entry in found["loads"]]
    assert ratios == sorted(ratios) and len(ratios) + len(found["left_out"]) == 3
    assert found["left_out"] == [n for n in range(3) if draw_choices(2, n).trace_files]
    assert found["summary"]["ratio"]["worst"] == ratios[0]
    for entry in found["loads"]:
        assert {name: len(outcomes) for name, outcomes in entry["outcomes"].items()} == {
            "fifo": 1,
            "sarathi": 1,
            "scorpio-tuned": 4,
        }
        others = [o["adherence"] for name in ("sarathi", "scorpio-tuned") for o in entry["outcomes"][name]]
        assert entry["best_other"] == max(others)
        assert 0 < entry["bound"] <= 1
        assert entry["of_bound"] == pytest.approx(entry["adherence"] / entry["bound"])


@pytest.mark.exhaustive
def test_processes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # other processes do not see the patched loads
    alone, together = (run_grid(grid_of(count=2, seed=11, policies=("fifo", "pack"), jobs=jobs)) for jobs in (1, 2))
    assert len(alone["loads"]) == 2
    assert alone == together


def test_every_policy_gets_the_same_requests_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = evaluation.simulate_as

    def record(arrivals, machine, options, lengths, seed):
        seen.append((tuple((a.at_s, a.output_len, a.slo, a.predicted_len) for a in arrivals), machine, seed))
        return real(arrivals, machine, options, lengths, seed)

    monkeypatch.setattr(evaluation, "simulate_as", record)
    number = next(n for n in range(20) if not draw_choices(2, n).trace_files)
    evaluate_load(grid_of(), number)
    assert len(seen) == 6 and all(run == seen[0] for run in seen)


def test_results_are_kept_until_what_they_depend_on_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(n for n in range(20) if not draw_choices(2, n).trace_files)
    first = evaluate_load(grid_of(cache=str(tmp_path)), number)
    files = set(tmp_path.iterdir())
    runs = []
    real = evaluation.simulate_as
    monkeypatch.setattr(
        evaluation, "simulate_as", lambda *args: runs.append(args[2]["scheduling_policy"]) or real(*args)
    )
    assert evaluate_load(grid_of(cache=str(tmp_path)), number) == first
    assert not runs and set(tmp_path.iterdir()) == files
    evaluate_load(grid_of(cache=str(tmp_path), given={"max_num_seqs": 2}), number)
    assert len(runs) == 6
    next(iter(files)).write_text("{")
    assert evaluate_load(grid_of(cache=str(tmp_path)), number) == first, "one that is cut off is made again"


def test_a_judged_policy_is_known_by_all_that_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shared.py"
    monkeypatch.setattr(cache, "scheduling_files", lambda: [file])

    def digests() -> tuple[str, str]:
        cache.digest_of_files.cache_clear()
        return tuple(cache.policy_digest("slack", with_shared=shared) for shared in (False, True))

    file.write_text("a = 1")
    own, whole = digests()
    file.write_text("a = 2")
    assert digests()[0] == own and digests()[1] != whole
    assert cache.policy_digest("fifo", with_shared=False) != own


def life(slo: Slo | None, ttft_s: float, reason: FinishReason = FinishReason.STOP, tenant: str = "") -> Lifetime:
    return Lifetime(0.0, slo, 1, tenant, [ttft_s], reason)


def test_an_outcome_counts_those_with_objectives() -> None:
    slo = Slo(1.0, class_name="1")
    lives = [life(slo, 0.5), life(slo, 1.5, tenant="b"), life(slo, 0.0, FinishReason.REJECTED), life(None, 9.0)]
    found = outcome_of(SimulationResult(lives, elapsed_s=2.0, busy_s=1.0, steps=4, preemptions=0))
    assert found["adherence"] == pytest.approx(1 / 3)
    assert found["goodput_req_s"] == pytest.approx(1 / 2)
    assert found["classes"] == {"1": {"requests": 3, "served": 2, "late": 1, "good": 1}}
    assert found["tenants"]["b"] == {"requests": 1, "served": 1, "late": 1, "good": 0}
    assert found["best_effort"] == 1


def test_ratios_and_what_is_said_of_them() -> None:
    assert (ratio(0.5, 0.25), ratio(0.0, 0.0), ratio(0.1, 0.0)) == (2.0, 1.0, inf)
    assert summary_of([0.98, 0.99, 1.2, 1.3]) == {"even": 0.75, "worst": 0.98, "median": pytest.approx(1.095)}
    assert summary_of([]) == {"even": None, "worst": None, "median": None}


def test_late_shares_are_pooled_by_kind_and_class() -> None:
    def entry(kinds: list[str], served: int, late: int) -> dict:
        counts = {"requests": served, "served": served, "late": late, "good": served - late}
        return {"kinds": kinds, "objectives": ["both", "e2e"], "classes": {"2": counts}}

    pools = pooled_late([entry(["stalls", "kv"], 400, 8), entry(["kv"], 100, 2)])
    found = {(pool["kind"], pool["of"]): (pool["served"], pool["share"], pool["enough"]) for pool in pools}
    for group in ("all", "class 2", "e2e"):
        assert found["kv", group] == (500, 0.02, True)
        assert found["stalls", group] == (400, 0.02, False)
    assert len(found) == 6


def test_policies_and_options_that_are_wrong() -> None:
    with pytest.raises(ConfigError, match="lottery"):
        check_grid(grid_of(policies=("lottery",)))
    with pytest.raises(ConfigError, match="scorpio_eps needs"):
        check_grid(grid_of(policies=("fifo",), given={"scorpio_eps": 1.0}))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grid.json"
    flags = f"--random-loads 3 --seed 2 --policies fifo,sarathi --jobs 1 --json {file} --cache {tmp_path / 'cache'}"
    assert grid.main(flags.split()) == 0
    said = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert len(written["loads"]) + len(written["left_out"]) == 3
    assert all(entry["description"] in said for entry in written["loads"])
    assert "adherence: at least .99 of the best other's on" in said
    assert f"left out: {len(written['left_out'])} loads that need a trace" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--random-loads 0", "--random-loads must be"),
        ("--random-loads 2 --traces /nowhere", "no directory '/nowhere'"),
        ("--random-loads 2 --policies lottery", "lottery"),
    ],
)
def test_wrong_options(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert grid.main(flags.split()) != 0
    assert message in capsys.readouterr().err
