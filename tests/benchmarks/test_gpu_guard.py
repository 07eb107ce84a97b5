"""benchmarks/gpu_guard.py: the committed figures, bounds, and what is said of a run."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_guard
from benchmarks.gpu_case import HIGHER_IS_BETTER, models_of
from benchmarks.gpu_guard import CHECKS, RESULTS, START, Check, Reference, checks, references, verdict
from tests.benchmarks.fake_tree import write_client, write_tree

MODELS = models_of([check.case for check in CHECKS])


def test_every_check_has_a_committed_figure() -> None:
    committed = references(RESULTS)
    for check in checks(MODELS):
        found = committed[check.case.key, check.figure]
        assert found.value > 0 and found.gpu.startswith("NVIDIA"), check
        assert 0 < check.tolerance < 1 and check.protects and check.spread


def test_it_is_a_dozen_rows() -> None:
    assert 10 <= len({check.case for check in CHECKS}) <= 13
    assert {check.figure for check in checks(["gpt2"])} == {"output_tok_s", "tpot_p99_ms", START}


@pytest.mark.parametrize("check", checks(MODELS), ids=lambda check: f"{check.case.key} {check.figure}")
def test_bounds(check: Check) -> None:
    better = 1 if check.figure in HIGHER_IS_BETTER else -1
    assert check.passes(100 * (1 - better * 0.999 * check.tolerance), 100)
    assert not check.passes(100 * (1 - better * 1.001 * check.tolerance), 100)
    assert check.passes(100 * (1 + better * 0.9), 100), "better is never worse"


def test_verdicts() -> None:
    check, reference = CHECKS[0], Reference(100.0, "card", "client", "abc")
    assert verdict(check, 100.0, reference, "card", "client") == "ok"
    assert verdict(check, 50.0, reference, "card", "client") == "WORSE"
    assert verdict(check, None, reference, "card", "client") == "not measured"
    assert verdict(check, 100.0, None, "card", "client") == "no committed figure"
    assert "measured on card" in verdict(check, 100.0, reference, "another", "client")
    assert "measured by client" in verdict(check, 100.0, reference, "card", "another")


def write_result(folder: Path, date: str, hol: float, burst: float) -> None:
    rows = [
        {"model": "gpt2", "row": name, "error": None, "figures": {"output_tok_s": rate, "tpot_p99_ms": 4.0}}
        for name, rate in (("hol", hol), ("burst65", burst))
    ]
    facts = {"date": date, "commit": date, "hardware": {"gpu": "card"}, "client": ["python", "client.py"]}
    servers = {"gpt2": {"start_s": [60.0]}}
    (folder / f"gpu-{date}.json").write_text(json.dumps({**facts, "servers": servers, "rows": rows}))


def guard(monkeypatch: pytest.MonkeyPatch, folder: Path, rate: float) -> tuple[int, dict[str, str]]:
    """Run the guard for gpt2, on a card called "card", against a server of this rate. Return code and verdicts."""
    models = folder / "models" / "gpt2"
    models.mkdir(parents=True, exist_ok=True)
    tree, real = write_tree(folder / "tree", rate), gpu_guard.start_server
    monkeypatch.setattr(gpu_guard, "start_server", lambda *args, **more: real(*args, **more, tree=tree))
    monkeypatch.setattr(gpu_guard, "gpu", lambda: {"gpu": "card"})
    words = ["--out", str(folder), "--models", "gpt2", "--models-dir", str(models.parent), "--results", str(folder)]
    monkeypatch.setattr(sys, "argv", ["gpu_guard", *words, "--client", str(write_client(folder))])
    status = gpu_guard.main()
    told = json.loads((folder / "gpu-guard.json").read_text())
    return status, {f"{line['case']} {line['figure']}": line["verdict"] for line in told["checks"]}


def test_the_newest_committed_figures_count(tmp_path: Path, monkeypatch, capsys) -> None:
    write_result(tmp_path, "2026-01-02", 100, 100)
    write_result(tmp_path, "2026-01-01", 200, 200)
    status, verdicts = guard(monkeypatch, tmp_path, 90)
    assert status == 0 and set(verdicts.values()) == {"ok"} and len(verdicts) == 4
    printed = capsys.readouterr().out
    assert "gpt2 hol" in printed and "2026-01-02" in printed and "host time of steps" in printed


def test_worse_is_a_failure(tmp_path: Path, monkeypatch, capsys) -> None:
    write_result(tmp_path, "2026-01-01", 100, 110)
    status, verdicts = guard(monkeypatch, tmp_path, 84)
    assert status == 1
    assert verdicts == {
        "gpt2 hol output_tok_s": "WORSE",
        "gpt2 burst65 output_tok_s": "ok",
        "gpt2 burst65 tpot_p99_ms": "ok",
        "gpt2 start start_s": "ok",
    }


def test_failed_requests_are_a_failure(tmp_path: Path, monkeypatch, capsys) -> None:
    write_result(tmp_path, "2026-01-01", 100, 100)
    status, verdicts = guard(monkeypatch, tmp_path, -5)
    assert status == 1 and verdicts["gpt2 hol output_tok_s"] == "not measured"
    assert "FAILED gpt2 hol: gpt2 hol: 1 failed" in capsys.readouterr().out
