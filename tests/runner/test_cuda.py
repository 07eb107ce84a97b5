"""Behaviour specific to GPUs: the other path of the draw, asynchronous copies, the measured cache."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.plan import Admission, Row, StepPlan
from roseinfer.core.sampling import SequenceParams
from roseinfer.runner.build import BuiltRunner, build_runner
from roseinfer.runner.forward import Columns, build_batch
from roseinfer.runner.sampler import Sampler
from roseinfer.runner.seats import SeatTable
from tests.runner.test_build import LLAMA
from tests.runner.test_sampler import random_params

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SEATS, VOCAB, LENGTH = 16, 3000, 64


def seated(device: str, params: list[SequenceParams]) -> SeatTable:
    table = SeatTable(SEATS, LENGTH, 4, VOCAB, torch.device(device))
    prompts = [list(range(i, i + 10)) for i in range(SEATS)]
    table.admit(
        [Admission(f"r{i}", i, prompts[i], 10, p, 50 + i, (7, 8), (i, i + 1, i + 2)) for i, p in enumerate(params)]
    )
    return table


def test_samples_what_a_cpu_samples():
    """Leave out top-k and top-p, whose kept tokens a GPU runs through in another order."""
    rng = random.Random(3)
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        params = [replace(random_params(rng), top_k=0, top_p=1.0) for _ in range(SEATS)]
        tables = {device: seated(device, params) for device in ("cpu", "cuda")}
        for step in range(6):
            logits = torch.randn(SEATS, VOCAB, generator=generator) * 3
            seats, ends = list(range(SEATS)), [10 + step] * SEATS
            sampled = {d: Sampler(t).sample(logits.clone().to(d), seats, ends) for d, t in tables.items()}
            assert sampled["cpu"].tokens.tolist() == sampled["cuda"].tokens.tolist()
            entries = {d: [e for part in s.scores for e in part.download().to_python()] for d, s in sampled.items()}
            torch.cuda.synchronize()
            for a, b in zip(*entries.values(), strict=True):
                assert (a.token_id, a.rank) == (b.token_id, b.rank)
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.fixture
def no_waiting():
    """Fail if the host waits for the device."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_building_and_sampling_never_wait_for_the_device(no_waiting):
    rng = random.Random(5)
    params = [random_params(rng) for _ in range(SEATS)]
    table = seated("cuda", params)
    logits = torch.randn(SEATS, VOCAB, device="cuda")
    decode = [Row(f"r{i}", i, 10, 1, 1, True, 10, 2, (3 * i,)) for i in range(SEATS)]
    mixed = [*decode[:-1], Row("r15", 15, 0, 10, 1, True, 4, 0, ())]
    again = [Admission("r3", 3, list(range(12)), 10, params[3], 1, (7,), (1, 2, 3))]
    sampler = Sampler(table)
    for warm in (True, False):
        if not warm:
            no_waiting()
        for rows in (decode, mixed):
            table.release([3])
            table.admit(again)
            table.grow_tables([row for row in rows if row.new_blocks])
            build_batch(Columns.of(rows), table)
            sampler.sample(logits.clone(), list(range(SEATS)), [11] * SEATS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 64, "intermediate_size": 96}))
    return tmp_path


def build(folder: Path, device: str, **cache: int) -> BuiltRunner:
    config = EngineConfig(
        model=ModelConfig(load_format="dummy", device=device, dtype="float32"),
        cache=CacheConfig(**{"block_size": 16, **cache}),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
    )
    return build_runner(config, folder)


def test_the_default_cache_is_measured_and_capped_by_use(folder):
    facts = build(folder, "cuda").facts
    assert facts.num_blocks == 8 * 64 // 16
    assert facts.device.startswith("cuda")


def test_depth_2_equals_depth_1(folder):
    """Check that steps read tokens from the pool before any is collected, and results arrive by asynchronous copies."""
    texts = []
    for depth in (1, 4):
        runner = build(folder, "cuda", num_kv_blocks=64).runner
        params = [SequenceParams(max_tokens=40, temperature=t, top_p=0.9, logprobs=1) for t in (0.0, 1.0, 1.5)]
        admitted = [
            Admission(f"r{i}", i, [5 + i] * 9, 9, p, i, (), tuple(range(4 * i, 4 * i + 4)))
            for i, p in enumerate(params)
        ]
        rows = [Row(f"r{i}", i, 0, 9, 1, True, 0, 0, ()) for i in range(3)]
        pending, results = [], []
        for step in range(40):
            handle = runner.submit(StepPlan(step, rows, admitted))
            runner.sample(handle)
            pending.append(handle)
            if len(pending) == depth:
                results.append(runner.collect(pending.pop(0)))
            admitted, rows = [], [Row(f"r{i}", i, 9 + step, 1, 1, True, 9 + step, 0, ()) for i in range(3)]
        results += [runner.collect(handle) for handle in pending]
        texts.append([[row.token_ids[0] for row in r.rows] for r in results])
        assert all(row.logprobs[0].token_id == row.token_ids[0] for r in results for row in r.rows)
        assert all(r.duration_s > 0 for r in results)
    assert texts[0] == texts[1]
