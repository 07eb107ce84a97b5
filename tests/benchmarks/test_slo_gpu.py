"""benchmarks/slo_gpu.py: loads, and summaries of a run."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import slo_gpu
from benchmarks.research.bound import capacity
from roseinfer.bench.slo_classes import read_classes
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.distributions import Uniform
from roseinfer.sim.workload import TrafficClass, Workload

RESULT = Path(slo_gpu.__file__).parent / "results" / "slo-h200.json"


@pytest.mark.parametrize("name", slo_gpu.LOADS)
def test_the_client_reads_the_classes(name: str, tmp_path: Path) -> None:
    load = slo_gpu.LOADS[name]
    file = tmp_path / "classes.json"
    file.write_text(json.dumps(load.class_list()))
    found = read_classes(str(file))
    assert sum(entry.share for entry in found) == pytest.approx(1, abs=1e-3)
    for entry in found:
        told = entry.body["slo"]
        assert (told["ttft_ms"], told["tpot_ms"]) == (
            pytest.approx(1e3 * entry.ttft_s),
            pytest.approx(1e3 * entry.tpot_s),
        )
        longest = (entry.prompts or (0, 1024))[1]
        assert longest + 512 <= load.max_model_len


def test_the_long_load_is_at_half_of_the_capacity() -> None:
    """On the machine of `roseinfer calibrate` (docs/how-to/calibrate.md), by the simulator's bound."""
    cost = CostParams(4.57e-3, 17.2e-6, 3.9e-9, 13.5e-6, 34e-9)
    machine = Machine(cost, max_model_len=32768, num_blocks=27000, prefix_caching=False)
    load, outputs = slo_gpu.LOADS["long"], Uniform(16, 512)
    classes = [
        TrafficClass(name, Uniform(own["in_min"], own["in_len"]), outputs, Slo(ttft_s, tpot_s, class_name=name), share)
        for name, share, ttft_s, tpot_s, own in load.classes
    ]
    rates = [capacity(Workload(classes, 1.0).requests(1000, seed), machine) for seed in range(3)]
    assert load.rates == (pytest.approx(fmean(rates) / 2, rel=0.1),)


def test_the_published_run_is_still_shown(capsys: pytest.CaptureFixture[str]) -> None:
    slo_gpu.show(json.loads(RESULT.read_text()), None)
    lines = capsys.readouterr().out.splitlines()
    assert any("slack" in line and "0.962" in line and "adherence 0.96: yes" in line for line in lines)


def test_each_load_has_a_model_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    args = slo_gpu.parse_args(["--out", "x", "--load", "experts"])
    assert (args.model, args.rates) == ("qwen3-30b-a3b-fp8", [15, 25, 35])
    assert {entry["tpot"] for entry in slo_gpu.LOADS["experts"].class_list()} == {0.012, 0.018}
    assert slo_gpu.parse_args(["--out", "x", "--model", "qwen3-8b-fp8-kv"]).model == "qwen3-8b-fp8-kv"
    with pytest.raises(SystemExit):
        slo_gpu.parse_args(["--out", "x", "--model", "qwen3-30b-a3b"])
    assert "--load six is for qwen3-8b" in capsys.readouterr().err


def test_options() -> None:
    assert slo_gpu.parse_args(["--out", "x"]).rates == [15, 25, 35, 50, 70]
    args = slo_gpu.parse_args(["--out", "x", "--load", "long", "--policies", "slack,qoserve"])
    assert (args.rates, args.policies) == ([1.7], ["slack", "qoserve"])
    assert slo_gpu.parse_args(["--out", "x", "--model", "qwen3-8b-fp8-kv"]).model == "qwen3-8b-fp8-kv"
    for wrong in (["--load", "long", "--client", "loadgen.py"], ["--model", "gpt2"]):
        with pytest.raises(SystemExit):
            slo_gpu.parse_args(["--out", "x", *wrong])


def test_families_have_objectives_of_their_lone_step():
    args = slo_gpu.parse_args(["--out", "x", "--load", "gpt-oss-20b"])
    assert args.model == "gpt-oss-20b"
    lone_ms, _ = slo_gpu.FAMILIES["gpt-oss-20b"]
    tpot_ms = sorted({entry["body"]["slo"]["tpot_ms"] for entry in slo_gpu.LOADS["gpt-oss-20b"].class_list()})
    assert tpot_ms == pytest.approx([2.0 * lone_ms, 3.3 * lone_ms], abs=0.01)
