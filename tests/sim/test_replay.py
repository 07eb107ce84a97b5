"""A recorded run, replayed: the same plans, and the same latencies, from the file alone."""

import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from roseinfer.calibration.recorded import recorded_samples
from roseinfer.core.clock import ManualClock
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import StepLimits, StepPlan
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.messages import Add
from roseinfer.engine.record import RecordingCore, engine_recorder
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.offload import OffloadCosts
from roseinfer.sched.registry import make_policy, options_of
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.arrivals import read_trace
from roseinfer.sim.engine import END, FixedLengthRunner
from roseinfer.sim.parity import parity_of
from roseinfer.sim.replay import read_recording, replay
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.workload import VOCAB_COUNT as VOCAB
from roseinfer.sim.workload import poisson
from tests.helpers.cases import each_value
from tests.helpers.kv_managers import kv_manager

pytestmark = pytest.mark.long

MACHINE = SCORPIO_8B.machine


def estimates() -> Estimates:
    return Estimates(cost=CostModel(MACHINE.cost))


def record(
    path: Path,
    scheduler: SchedulerConfig,
    machine: Machine = MACHINE,
    rate: float = 12.0,
    kinds: int = 0,
    requests: int = 50,
    longest: int = 900,
) -> list[StepPlan]:
    """A run with a noisy machine, a host that takes its time between steps, late arrivals and aborts.

    kinds: of prompts that begin with the same 640 tokens, each twice in turn; 0 = none share theirs.
    longest: of outputs, in tokens.
    """
    clock, rng = ManualClock(), random.Random(0)
    limits = StepLimits.of(scheduler, machine.max_model_len)
    outputs = FixedLengthRunner()
    priced = PricedRunner(outputs, machine, clock, limits=limits)
    plans: list[StepPlan] = []
    submit = priced.submit
    priced.submit = lambda plan: plans.append(plan) or submit(plan)
    kv = kv_manager(
        machine.num_blocks,
        machine.block_size,
        prefix_caching=machine.prefix_caching,
        num_host_blocks=machine.num_host_blocks,
    )
    known = estimates()
    copies = OffloadCosts.for_policy(options_of(scheduler), known, machine.cost.load_s, machine.cost.store_s)
    policy = make_policy(scheduler, known)
    core = RecordingCore(
        engine_recorder(path),
        Scheduler(scheduler, kv, policy, machine.max_model_len, limits, offloading=copies),
        priced,
        clock,
        depth=2 if scheduler.overlap else 1,
        eos_ids=(END,),
        vocab_size=VOCAB,
    )
    arrivals = SCORPIO_8B.mix.requests(poisson(rate, requests, 0), 0)
    number = 0
    while number < len(arrivals) or core.busy:
        if not core.busy:
            clock.advance(max(0.0, arrivals[number].at_s - clock.now()))
        while number < len(arrivals) and arrivals[number].at_s <= clock.now():
            arrival = arrivals[number]
            prompt = [number // 2 % kinds] * 640 + [number] * 40 if kinds else list(arrival.prompt_ids)
            add = Add(str(number), Prompt(prompt, SequenceParams(max_tokens=900)))
            meta = RequestMeta(arrival_s=arrival.at_s, slo=arrival.slo, predicted_len=arrival.predicted_len)
            add.prompt = replace(add.prompt, meta=meta)
            core.add(add)
            outputs.expect(f"{number}:0", len(prompt), min(arrival.output_len, longest))
            number += 1
        if rng.random() < 0.01:
            core.abort([f"{rng.randrange(requests)}:0"])
        core.step()
        clock.advance(rng.random() * 0.002)
    core.close()
    return plans


@each_value(policy=["fifo", "scorpio", "slack"], overlap=[False, True])
def test_a_replay_makes_the_same_plans(tmp_path: Path, policy: str, overlap: bool) -> None:
    scheduler = SchedulerConfig(scheduling_policy=policy, overlap=overlap, max_num_seqs=64)
    file = tmp_path / "run.jsonl"
    plans = record(file, scheduler)
    recording = read_recording(str(file))
    again = replay(recording, estimates=estimates())
    assert [rows for rows in again.plans if rows] == [[(r[0], r[2], r[3]) for r in plan.rows] for plan in plans]
    assert again.plans == recording.plans
    ends = {name: end for name, end in recording.ends.items() if end.ttft_s is not None}
    assert again.ttft_s == {name: end.ttft_s for name, end in ends.items()}
    assert again.latency_s == {name: end.latency_s for name, end in ends.items()}
    assert again.tpot_s == {name: end.tpot_s for name, end in ends.items()}


def test_a_replay_loads_and_stores_the_same(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(scheduling_policy="slack", overlap=True, max_num_seqs=16)
    machine = replace(MACHINE, prefix_caching=True, num_blocks=300, num_host_blocks=2000)
    file = tmp_path / "run.jsonl"
    plans = record(file, scheduler, machine, rate=1.0, kinds=12, requests=60, longest=60)
    recording = read_recording(str(file))
    again = replay(recording, estimates=estimates())
    assert (again.plans, again.copies) == (recording.plans, recording.copies)
    loads, stores = (sum(map(len, each)) for each in zip(*recording.copies, strict=True))
    assert loads > 200 and stores > 100
    assert [copies for copies in again.copies if any(copies)] == [
        (plan.loads, plan.stores) for plan in plans if plan.loads or plan.stores
    ]
    assert any(plan.loads and not plan.rows for plan in plans), "a plan without rows"
    assert parity_of(str(file)).requests == 60
    samples, experts, _ = recorded_samples(str(file))
    assert len(samples) > 100 and experts is None


def test_another_policy_on_the_same_recording_makes_other_plans(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    record(file, SchedulerConfig(scheduling_policy="fifo"))
    recording = read_recording(str(file))
    assert replay(recording, SchedulerConfig(scheduling_policy="scorpio")).plans != recording.plans


def test_a_recorded_run_is_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    record(file, SchedulerConfig(scheduling_policy="fifo"))
    lines = read_trace(str(file))
    wanted = SCORPIO_8B.mix.requests(poisson(12.0, 50, 0), 0)
    assert len(lines) > 46
    prompts = statistics.median(len(arrival.prompt_ids) for arrival in wanted)
    assert statistics.median(line.prompt_len for line in lines) == pytest.approx(prompts, rel=0.1)
    assert lines[-1].at_s == pytest.approx(wanted[-1].at_s - wanted[0].at_s, abs=2.0)
    file.write_text(file.read_text()[:-5])  # the engine was killed while it wrote
    assert len(lines) - 1 <= len(read_trace(str(file))) <= len(lines)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.jsonl").write_text('{"a": 1}\n')
    for name in ("no.jsonl", "none.jsonl"):
        with pytest.raises(ConfigError, match=name):
            read_recording(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "message"), [("", "'setup' is missing"), ("{", "is not a recorded run"), ("5\n", "is not a recorded run")]
)
def test_other_files_are_no_recorded_runs(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recording(str(file))
