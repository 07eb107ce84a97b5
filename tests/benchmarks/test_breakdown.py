"""Breakdown of a step: sums by hand, and the command with the embedded model."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.breakdown import limits, measure
from benchmarks.breakdown.__main__ import main
from benchmarks.breakdown.engine_cost import engine_cost
from benchmarks.breakdown.limits import Limits, measure_limits
from benchmarks.breakdown.measure import HostClock, device_events
from benchmarks.model_cost import Chunk, ModelCost
from benchmarks.model_folders import make_tokenizer
from roseinfer.config.hub import model_folder
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.plan import StepPlan
from roseinfer.models.config import read_model_spec
from tests.helpers.mixture import MIXTURE

SMALL = ["tiny", "--threads", "1", "--num-kv-blocks", "64", "--max-num-seqs", "4"]
BREAKDOWN = [*SMALL, "--peak-bandwidth", "10", "--peak-tflops", "0.5", "--input-len", "20"]


def test_a_phase_does_not_count_what_is_within_it(monkeypatch):
    readings = iter([0.0, 1.0, 3.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(readings))
    clock = HostClock()
    with clock.span("submit"), clock.span("prepare"):  # 0 to 10 around 1 to 3
        pass
    with clock.span("submit"):
        pass
    assert clock.seconds == {"prepare": 2.0, "submit": 8.0 + 1.0}
    clock.step_begins(StepPlan(0, []))
    clock.reset()
    assert not clock.seconds and not clock.plans


def test_device_events_of_a_trace():
    events = [
        {"cat": "kernel", "name": "a", "dur": 2.0, "ts": 1},
        {"cat": "kernel", "name": "a", "dur": 3.0, "ts": 9},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 1.5, "ts": 20.5},
        {"cat": "gpu_user_annotation", "name": "forward", "dur": 99.0, "ts": 0},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 99.0, "ts": 0},
        {"name": "process_name", "ph": "M"},
    ]
    found = device_events(events)
    assert found == {"a": (pytest.approx(5e-6), 2), "Memcpy HtoD": (pytest.approx(1.5e-6), 1)}


def test_kernels_that_overlap_share_the_time():
    """b starts early and waits for a; c is hidden by b; a runs again after a pause."""
    events = [
        {"cat": "kernel", "name": "a", "ts": 20, "dur": 1},
        {"cat": "kernel", "name": "b", "ts": 3, "dur": 9},
        {"cat": "kernel", "name": "a", "ts": 0, "dur": 10},
        {"cat": "gpu_memcpy", "name": "c", "ts": 5, "dur": 2},
    ]
    found = device_events(events)
    assert found == {"a": (pytest.approx(11e-6), 2), "b": (pytest.approx(2e-6), 1), "c": (0.0, 1)}


def test_limits(monkeypatch):
    measured = measure_limits(torch.device("cpu"))
    assert measured.bytes_s > 1e6 and measured.flops_s > 1e6
    monkeypatch.setattr(limits, "median_seconds", lambda work, device: work() is None or 2.0)
    assert measure_limits(torch.device("cpu")) == Limits(2**26, 2**30)
    monkeypatch.setattr(limits, "median_seconds", None)
    assert measure_limits(torch.device("cpu"), 7.0, 8.0) == Limits(7.0, 8.0), "given rates are not measured"


def test_command(capsys, tmp_path):
    file = tmp_path / "out.json"
    argv = ["--batch-size", "1", "--batch-size", "3", "--steps", "4", "--json", str(file)]
    assert main([*BREAKDOWN, *argv]) == 0
    printed = capsys.readouterr().out
    assert "batch 3, context" in printed and "wait for the device" in printed and "GEMM" in printed
    one, three = json.loads(file.read_text())["breakdown"]
    for found in (one, three):
        assert sum(found["host"].values()) == pytest.approx(found["step_s"])
        assert all(found["host"][phase] > 0 for phase in ("plan", "prepare inputs", "forward", "sample", "commit"))
        assert found["device"]["GEMM"] > 0 and found["device"]["attention"] > 0
        assert found["device_s"] == pytest.approx(sum(kernel["seconds"] for kernel in found["kernels"]))
        work, step_s = found["work"], found["step_s"]
        moved = work["weight_bytes"] + work["kv_bytes"]
        assert found["bandwidth_share"] == pytest.approx(moved / step_s / 10e9)
        assert found["matrix_share"] == pytest.approx((work["linear_flops"] + work["attention_flops"]) / step_s / 5e11)
    assert (one["work"]["tokens"], three["work"]["tokens"]) == (1, 3)
    assert three["work"]["weight_bytes"] == one["work"]["weight_bytes"]
    assert three["work"]["linear_flops"] == 3 * one["work"]["linear_flops"]


@pytest.mark.parametrize(
    ("info", "layer", "head", "kv"),
    [
        ({"dtype": "bfloat16", "weights": "bfloat16", "kv_cache": "bfloat16"}, 2, 2, 2),
        ({"dtype": "bfloat16", "weights": "fp8 by block", "kv_cache": "fp8"}, 1, 2, 1),
        ({"dtype": "float32", "weights": "fp8 by channel, widened", "kv_cache": "float32"}, 4, 4, 4),
        ({"dtype": "float32", "weights": "int8, activations in 7 bits", "kv_cache": "fp8"}, 1, 1, 1),
    ],
)
def test_bytes_of_what_the_engine_keeps(info, layer, head, kv):
    spec = read_model_spec(model_folder(ModelConfig(model="tiny")))
    facts = SimpleNamespace(dtype=info["dtype"], weights=info["weights"])
    described = SimpleNamespace(facts=facts, kv_cache=info["kv_cache"])
    cost, plain = engine_cost(spec, described), ModelCost.of(spec, 1)
    assert (cost.weight_itemsize, cost.head_itemsize) == (layer, head)
    assert cost.kv_token_bytes == kv * plain.kv_token_bytes


def test_a_model_with_experts(tmp_path):
    """Expert weights are counted separately, and their kernels have a kind of their own."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    make_tokenizer(MIXTURE["vocab_size"]).save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "out.json"
    argv = ["--load-format", "dummy", *SMALL[1:], "--peak-bandwidth", "10", "--peak-tflops", "0.5", "--json", str(file)]
    assert main([str(tmp_path), *argv, "--batch-size", "2", "--steps", "2"]) == 0
    (found,) = json.loads(file.read_text())["breakdown"]
    assert 0 < found["work"]["expert_bytes"] < found["work"]["weight_bytes"]


@pytest.mark.exhaustive
def test_steps_with_prompts(capsys, tmp_path):
    """50 prompt tokens of 20, 20 and 10 per step, alone and with 2 rows; fewer such steps run than --steps."""
    file = tmp_path / "out.json"
    argv = ["--max-num-seqs", "16", "--batch-size", "2", "--prompt-tokens", "50", "--steps", "5", "--json", str(file)]
    assert main([*BREAKDOWN, *argv]) == 0
    printed = capsys.readouterr().out
    assert "batch 2 and 50 prompt tokens, context" in printed and "started, seconds: load" in printed
    decoding, alone, both = json.loads(file.read_text())["breakdown"]
    loads = [(found["load"]["batch_size"], found["load"]["prompt_tokens"]) for found in (alone, decoding, both)]
    assert loads == [(0, 50), (2, 0), (2, 50)]
    assert [found["work"]["tokens"] for found in (alone, decoding, both)] == [50, 2, 52]
    assert [found["load"]["steps"] for found in (alone, decoding, both)] == [4, 5, 4]
    spec = read_model_spec(model_folder(ModelConfig(model="tiny")))
    prompts = [Chunk(0, length) for length in (20, 20, 10)]
    assert alone["work"]["attention_flops"] == ModelCost.of(spec, 4).work(prompts).attention_flops
    assert alone["context"] == 0 and both["context"] > 20


def test_contexts_are_those_of_the_measured_steps(capsys, tmp_path):
    """20 prompt tokens and 16 warm-up steps: the measured steps compute tokens 37 to 39."""
    file = tmp_path / "out.json"
    argv = ["--batch-size", "1", "--steps", "3", "--json", str(file)]
    assert main([*BREAKDOWN, *argv]) == 0
    (found,) = json.loads(file.read_text())["breakdown"]
    assert found["context"] == 38


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--batch-size", "5"], 1, "not computed in one step"),
        (["--batch-size", "2", "--max-batch-size", "1"], 1, "not computed in one step"),
        (["--profile", "x"], 2, "--profile"),
        (["--overlap", "--device", "cpu"], 2, "--overlap"),
        (["--steps", "0"], 2, "--steps"),
        (["--prompt-tokens", "0"], 2, "--prompt-tokens"),
        (
            ["--batch-size", "1", "--prompt-tokens", "60", "--max-num-batched-tokens", "50"],
            1,
            "batch 0 and 60 prompt tokens",
        ),
        (["--batch-size", "1", "--max-model-len", "32"], 2, "context"),
    ],
)
def test_refused(argv, status, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*BREAKDOWN, "--steps", "2", *argv]) == status
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert list(itertools.islice(tmp_path.iterdir(), 1)) == []
