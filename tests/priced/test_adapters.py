"""LoRA adapters of a priced engine: no file is opened, and reads and copies take their time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from roseinfer.config.hub import model_folder
from roseinfer.core.adapters import AdapterLoad
from roseinfer.core.clock import ManualClock
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.plan import Row, StepPlan
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.build import build_engine
from roseinfer.engine.messages import Add
from roseinfer.engine.options import make_engine_config
from roseinfer.priced.adapters import AdapterMachine, PricedAdapterFiles
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.engine import FixedLengthRunner


def test_reads_follow_each_other() -> None:
    clock = ManualClock()
    files = PricedAdapterFiles(AdapterMachine(num_bytes=100, read_bytes_per_s=100), clock, {"given": "/given"})
    (given,) = files.take_read()
    assert given.name == "given" and given.seconds == 0
    files.read("a", "/a")
    files.read("b", "/b")
    assert files.take_read() == []
    clock.advance(1.5)
    (first,) = files.take_read()
    assert (first.name, first.seconds, first.adapter.num_bytes) == ("a", 1.0, 100)
    clock.advance(0.5)
    assert [read.adapter.digest == first.adapter.digest for read in files.take_read()] == [False]


@pytest.mark.parametrize(("num_bytes", "seconds"), [(100, 0.02), (3000, 0.03)])
def test_a_copy_runs_beside_rows(num_bytes: int, seconds: float) -> None:
    adapters = AdapterMachine(num_bytes=num_bytes, load_bytes_per_s=1e5)
    runner = PricedRunner(FixedLengthRunner(), Machine(CostParams(step_s=0.02), adapters=adapters), ManualClock())
    load = (AdapterLoad(0, "x"),)
    assert runner.submit(StepPlan(0, [], [], [], [], 0, adapter_loads=load)).duration_s == num_bytes / 1e5
    row = Row("r:0", 0, 5, 1, 1, True, 5, 0, ())
    step = runner.submit(StepPlan(1, [row], [], [], [], 1, adapter_loads=load))
    assert step.duration_s == pytest.approx(seconds, rel=0.01)


def test_an_engine_serves_adapters_without_their_files(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(cost_as_json(CostParams(1e-4, 1e-6, 0.0, 1e-6, 0.0))))
    config = make_engine_config(device="priced", cost=str(cost))
    config = replace(config, adapters=AdapterConfig(lora=("a=/no/such/folder",), lora_dir="/no/such", lora_slots=1))
    core, info = build_engine(config, model_folder(config.model))
    (adapter,) = info.adapters
    assert adapter.name == "a" and info.facts.adapters.num_slots == 1
    params = SequenceParams(max_tokens=3, ignore_eos=True)
    core.add(Add("x", Prompt([5, 6], params, RequestMeta(adapter=adapter)), 1))
    tokens = []
    while core.busy:
        tokens += [token for output in core.step() for token in output.token_ids]
    assert len(tokens) == 3 and core.stats().adapters.loads == 1
    core.close()
