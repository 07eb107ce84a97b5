"""benchmarks/experts_cuts: all of it on small layers in Triton's interpreter, its searches, and who watches over it."""

import json
import sys
import time
from dataclasses import dataclass
from math import inf

import pytest

from benchmarks.experts_cuts.__main__ import main, supervise
from benchmarks.experts_cuts.grid import Search, Way, cut_fits, down_fits, gate_up_fits, ways_of
from benchmarks.experts_cuts.report import report, whole_rows
from benchmarks.experts_cuts.results import TRYING, add_result, read_results
from benchmarks.experts_cuts.size import TINY, Size
from roseinfer.kernels.experts_few_configs import choose_few_config
from roseinfer.kernels.experts_tile_configs import choose_experts_config
from roseinfer.kernels.triton_support import HAS_TRITON
from tests.helpers.interpreter import allow_loaded_loop_bounds, round_codes

PARTS = {"few", "many", "gate_up", "down", "route", "logits", "order", "spread", "add"}


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_dry_run(tmp_path, monkeypatch, capsys):
    allow_loaded_loop_bounds(monkeypatch)
    round_codes()
    command = ["--tiny", "--kinds", "fp8", "--out", str(tmp_path)]
    assert main(command) == 0
    lines = read_results(tmp_path)
    assert [line for line in lines if "failed" in line] == []
    assert {line["part"] for line in lines} == PARTS and {line["kind"] for line in lines} == {"fp8"}
    assert all(line["us"] > 0 and line["error"] < 0.02 and line["error_of_all"] < 0.01 for line in lines)
    told = capsys.readouterr().out
    assert f"{len(lines)} results, 0 failed" in told
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {(row["path"], row["kind"], row["tokens"]) for row in summary["whole"]}
    assert found == {("few", "fp8", 2), ("many", "fp8", 20)}
    assert main(command) == 0 and read_results(tmp_path) == lines, "all of it was known"


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_wrong_result_is_no_time(tmp_path, monkeypatch, capsys):
    from benchmarks.experts_cuts import cells
    from benchmarks.experts_cuts.bench import Bench

    allow_loaded_loop_bounds(monkeypatch)
    cell = cells.FewCell(Bench(TINY, tmp_path, time.time() + 600), "bf16", 2)
    assert 0 < cell.measure_config(cell.default, "right") < inf
    right = cells.experts_few
    monkeypatch.setattr(cells, "experts_few", lambda *args, **options: right(*args, **options).mul_(1.1))
    assert cell.measure_config(cell.default) == inf
    good, wrong = read_results(tmp_path)
    assert "us" in good and wrong["failed"].startswith("WrongResultError") and "us" not in wrong
    assert report(tmp_path, TINY.size) == 1 and "WrongResultError" in capsys.readouterr().out


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_what_kernels_write_is_there_before_any_is_compiled(tmp_path, monkeypatch):
    """While kernels are compiled none runs: an order that is made then would have any numbers."""
    from benchmarks.experts_cuts import cells, layer
    from benchmarks.experts_cuts.bench import Bench

    allow_loaded_loop_bounds(monkeypatch)
    round_codes()
    many = cells.ManyCell(Bench(TINY, tmp_path, time.time() + 600), "fp8", 20)
    ways = [Way(16, True, gathered) for gathered in (False, True)]
    tiles = [cells.TileCell(many.bench, "fp8", 20, way, part) for way in ways for part in ("gate_up", "down")]
    for cell in tiles:
        cell.prepare()

    def not_now(*given: object) -> None:
        raise AssertionError("not before it was to be compiled")

    monkeypatch.setattr(layer, "order_pairs", not_now)
    monkeypatch.setattr(cells, "spread", not_now)
    for cell in tiles:
        cell.launch(cell.search.start)


def test_errors_have_limits():
    torch = pytest.importorskip("torch")
    from benchmarks.experts_cuts.bench import CODES_TOLERANCE, TOLERANCE
    from benchmarks.experts_cuts.layer import Error, error_of

    assert Error(0.03, 0.009).within(CODES_TOLERANCE) and not Error(0.03, 0.009).within(TOLERANCE)
    assert not Error(0.03, 0.03).within(CODES_TOLERANCE), "all rows are off"
    assert not Error(float("nan"), 0.0).within(CODES_TOLERANCE) and not Error(0.0, float("nan")).within(TOLERANCE)
    expected = torch.tensor([[3.0, 4.0], [0.0, 12.0]])
    assert error_of(expected + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), expected) == pytest.approx((0.2, 1 / 13))


@dataclass(frozen=True)
class Point:
    a: int = 1
    b: int = 1
    c: int = 1


def test_a_search_goes_on_from_the_best():
    """Each axis alone, then all that helped at once; what does not work is never the best, nor tried twice."""
    search = Search(Point(), {"a": (1, 2, 3), "b": (1, 2), "c": (1, 9)}, lambda point: point.c < 9 or point.a > 1)
    first = search.wanted()
    assert first == [Point(), Point(2), Point(3), Point(1, 2)], "not what does not fit"
    search.times = {Point(): 10.0, Point(2): 8.0, Point(3): float("inf"), Point(1, 2): 9.0}
    assert search.best == Point(2)
    assert search.wanted() == [Point(2, 2), Point(2, 1, 9)]


def test_cuts_that_cannot_work_are_not_tried():
    size = Size()
    for kind, element in (("block", 1), ("none", 2)):
        for tokens in (1, 2, 8, 16):
            config = choose_few_config(tokens, size.top_k, size.hidden, size.width, kind)
            assert gate_up_fits(config.gate_up, size.hidden, size.width, element)
            assert down_fits(config.down, size.top_k, size.hidden, size.width, element)
        for tokens in (8, 64, 128, 256, 512, 2048, 8192):
            config = choose_experts_config(tokens, size.top_k, size.experts, size.width, codes=element == 1)
            way = Way(config.tile, config.weight_first, config.spread)
            assert way in ways_of(tokens * size.top_k / size.experts, codes=element == 1)
            assert cut_fits(config.gate_up, way, 2, codes=element == 1)
            assert cut_fits(config.down, way, 1, codes=element == 1)
    assert not cut_fits(config.gate_up, Way(256, False, True), 2, codes=True), "its sums would not be in registers"


def test_a_bound_and_the_best_of_a_layer():
    line = {"part": "few", "kind": "fp8", "tokens": 1, "way": "", "experts": 8.0}
    lines = [
        line | {"config": name, "us": us, "default": name == "own"} for name, us in (("own", 20.0), ("other", 16.0))
    ]
    (row,) = whole_rows(lines, Size())
    assert (row["default us"], row["best us"], row["best config"]) == (20.0, 16.0, "other")
    assert row["bound us"] == pytest.approx((8 * 3 * 768 * 2048 + 2 * 128 * 2048) / 4.27e6)


CHILD = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
if not (out / "results.jsonl").exists():
    (out / "trying.json").write_text(json.dumps({"part": "few"}))
    sys.exit(86)
"""

CRASHED_CHILD = """
import json, pathlib, sys
results = pathlib.Path(sys.argv[1]) / "results.jsonl"
if not results.exists():
    results.write_text(json.dumps({"part": "gate_up", "failed": "an index out of bounds"}) + "\\n")
    sys.exit(86)
"""


def test_a_process_that_ends_is_started_again(tmp_path):
    assert supervise([sys.executable, "-c", CHILD, str(tmp_path)], tmp_path, time.time() + 600) == 2
    assert read_results(tmp_path) == [{"part": "few", "failed": "the process ended with 86"}]
    assert not (tmp_path / TRYING).exists()


def test_a_process_that_knows_why_it_ends_is_started_again(tmp_path):
    """It has written what failed by itself."""
    assert supervise([sys.executable, "-c", CRASHED_CHILD, str(tmp_path)], tmp_path, time.time() + 600) == 2
    assert read_results(tmp_path) == [{"part": "gate_up", "failed": "an index out of bounds"}]


def test_a_process_that_never_tries_anything_is_not(tmp_path):
    add_result(tmp_path, {"part": "few"})
    assert supervise([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, time.time() + 600) == 1
    assert read_results(tmp_path) == [{"part": "few"}]


def test_a_process_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.experts_cuts.__main__.GRACE_S", 0.0)
    assert supervise([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, time.time() + 0.3) == 1
