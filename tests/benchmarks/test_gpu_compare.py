"""benchmarks/gpu_compare.py: variants in alternating order, and what is said of them."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_compare
from benchmarks.gpu_case import Case, six_load
from benchmarks.gpu_compare import Run, Variant, rows
from tests.benchmarks.fake_tree import write_client, write_tree


def compare(monkeypatch: pytest.MonkeyPatch, out: Path, *argv: str) -> tuple[int, dict]:
    models = out / "models"
    for name in ("gpt2", "qwen3-8b"):
        (models / name).mkdir(parents=True, exist_ok=True)
    client = write_client(out)
    words = ["gpu_compare", "--out", str(out), "--models-dir", str(models), "--client", str(client), *argv]
    monkeypatch.setattr(sys, "argv", words)
    status = gpu_compare.main()
    return status, json.loads((out / "gpu-compare.json").read_text())


def test_variants(tmp_path: Path) -> None:
    (tmp_path / "roseinfer").mkdir()
    assert Variant.parse("new") == Variant("new")
    assert Variant.parse("a=--log-level error --seed=3") == Variant("a", None, "--log-level error --seed=3")
    assert Variant.parse(f"old@{tmp_path}=--seed 3") == Variant("old", tmp_path.resolve(), "--seed 3")
    for text in ("", "@tree", "a b", f"old@{tmp_path}/none"):
        with pytest.raises(ValueError):
            Variant.parse(text)


def test_cases() -> None:
    assert Case.parse("qwen3-8b six@35").rate == 35 and Case.parse("gpt2 hol").rate is None
    for text in ("gpt2", "gpt2 none", "none hol", "gpt2 six@35", "qwen3-8b six@fast"):
        with pytest.raises(ValueError):
            Case.parse(text)


def test_classes_of_a_family_have_its_own_objectives() -> None:
    assert Case.parse("gpt-oss-20b six@15").rate == 15
    assert [six_load(model) for model in ("qwen3-8b-fp8-kv", "gpt-oss-20b", "gpt2")] == ["six", "gpt-oss-20b", None]


def test_ratios_pair_the_runs_of_one_number() -> None:
    figures = {"output_tok_s": (100.0, 200.0, 50.0), "ttft_p50_ms": (1.0, 1.0, 1.0)}
    runs = []
    for variant, factor in (("base", 1.0), ("other", 0.5)):
        for number in range(3):
            values = {name: of[number] * factor for name, of in figures.items()}
            runs.append(Run(variant, "gpt2 hol", number, dict.fromkeys(Case("gpt2", "hol").figures, 1.0) | values))
    runs.pop()  # the last pair is incomplete
    lines = rows(runs, Case("gpt2", "hol"), [Variant("base"), Variant("other")])
    line = next(line for line in lines if line["runs"] == 2)
    assert (line["variant"], line["median"], line["/ base"], line["range"]) == (
        "other",
        "75",
        "0.500",
        "0.500 to 0.500",
    )


@pytest.mark.exhaustive
def test_trees_are_served_in_alternating_order(tmp_path: Path, monkeypatch, capsys) -> None:
    new, old = write_tree(tmp_path / "new", 50), write_tree(tmp_path / "old", 100)
    cases = ["--cases", "gpt2 hol", "qwen3-8b six@35"]
    variants = ["--variants", f"new@{new}", f"old@{old}", f"slow@{old}=--rate 10"]
    status, found = compare(monkeypatch, tmp_path, *cases, *variants)
    printed = capsys.readouterr().out
    assert status == 0, printed
    hol = [(run["variant"], run["figures"]["output_tok_s"]) for run in found["runs"] if run["case"] == "gpt2 hol"]
    assert hol == [("new", 50), ("old", 100), ("slow", 10), ("slow", 11), ("old", 101), ("new", 51)]
    six = [run["figures"]["adherence"] for run in found["runs"] if run["case"] == "qwen3-8b six@35"]
    assert six == [0.5, 1.0, 0.1, 0.11, 1.01, 0.51]
    assert {name: len(starts) for name, starts in found["start_s"].items()}["gpt2 slow"] == 2
    assert "1.990" in printed and "adherence" in printed


def test_together_the_runs_alternate_on_the_same_servers(tmp_path: Path, monkeypatch) -> None:
    tree = write_tree(tmp_path / "tree", 50)
    variants = ["--variants", f"a@{tree}", f"b@{tree}=--rate 10", "--together", "--rounds", "1", "--runs", "2"]
    status, found = compare(monkeypatch, tmp_path, "--cases", "gpt2 hol", *variants)
    assert status == 0
    assert [run["variant"] for run in found["runs"]] == ["a", "b", "b", "a"]
    assert found["start_s"].keys() == {"gpt2 a", "gpt2 b"}


def test_a_failed_variant_costs_only_its_own_figures(tmp_path: Path, monkeypatch, capsys) -> None:
    """One server ends at once, the requests of another fail."""
    good, gone = write_tree(tmp_path / "good", 50), tmp_path / "gone"
    (gone / "roseinfer").mkdir(parents=True)
    variants = ["--variants", f"good@{good}", f"gone@{gone}", f"bad@{good}=--rate=-9", "--rounds", "1"]
    status, found = compare(monkeypatch, tmp_path, "--cases", "gpt2 hol", *variants)
    assert status == 1 and [run["variant"] for run in found["runs"]] == ["good"]
    assert "gone" in found["errors"][0] and "1 failed" in found["errors"][1]
    assert "FAILED" in capsys.readouterr().out
