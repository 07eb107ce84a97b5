"""Limits of a step, which the scheduler, the runner and the measurement of its memory share."""

import json
from pathlib import Path

import pytest
import torch

from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import Row, StepLimits, StepPlan
from roseinfer.parallel.group import SingleRank
from roseinfer.runner import warm_up
from roseinfer.runner.build import build_runner
from roseinfer.runner.build_cache import free_cuda_bytes
from roseinfer.runner.build_model import load_for_runner
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.rehearsal import full_step
from tests.runner.test_build import LLAMA
from tests.runner.tiny import Bench


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Return a list of every plan that a runner gets."""
    seen: list[StepPlan] = []
    submit = ModelRunner.submit
    monkeypatch.setattr(ModelRunner, "submit", lambda self, plan: seen.append(plan) or submit(self, plan))
    return seen


def config(**scheduler: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(load_format="dummy", device="cpu"),
        cache=CacheConfig(block_size=4, num_kv_blocks=100),
        scheduler=SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 10, **scheduler}),
    )


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, StepLimits(4, 10)),
        ({"max_num_seqs": 16}, StepLimits(10, 10)),
        ({"enable_chunked_prefill": False}, StepLimits(4, 64 + 3)),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 500}, StepLimits(4, 500)),
    ],
)
def test_the_limits_of_the_options(options: dict[str, object], limits: StepLimits) -> None:
    assert StepLimits.of(config(**options).scheduler, 64) == limits


def test_a_full_step() -> None:
    assert full_step(StepLimits(4, 10), chunked=True) == [3, 3, 2, 2]
    assert full_step(StepLimits(4, 67), chunked=False) == [64, 1, 1, 1]


def test_the_runner_rejects_plans_beyond_the_limits() -> None:
    bench = Bench(seats=2, length=8)
    limits = StepLimits(2, 16)
    rows = [Row(f"r{seat}", seat, 0, 9, 1, True, 0, 0, ()) for seat in range(2)]
    with pytest.raises(AssertionError, match="a step of 18 tokens exceeds the limit of 16"):
        bench.runner.submit(StepPlan(0, rows, num_tokens=18))
    with pytest.raises(AssertionError, match="a step of 3 rows exceeds the limit of 2"):
        limits.check(StepPlan(0, [*rows, rows[0]], num_tokens=1))


@pytest.mark.parametrize("chunked", [True, False])
def test_a_rehearsal_keeps_to_the_limits(folder: Path, plans: list[StepPlan], chunked: bool) -> None:
    facts = build_runner(config(enable_chunked_prefill=chunked), folder).facts
    assert facts.limits == StepLimits(4, 10 if chunked else 67)
    assert plans and all(plan.num_tokens == sum(row.count for row in plan.rows) for plan in plans)
    assert all(plan.num_tokens <= facts.limits.max_tokens for plan in plans)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a GPU's memory."""
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (8 << 30, 8 << 30))


@pytest.mark.parametrize("chunked", [True, False])
def test_the_memory_of_the_fullest_step_is_measured(
    folder: Path, plans: list[StepPlan], chunked: bool, pretended_gpu: None
) -> None:
    """Check the step without chunking: a whole context and one token of each other row, not the budget."""
    options = config(enable_chunked_prefill=chunked)
    built = build_runner(options, folder)
    plans.clear()
    free_cuda_bytes(load_for_runner(options, folder, SingleRank()))
    limits = built.facts.limits
    fullest = max(plans, key=lambda plan: plan.num_tokens)
    assert (len(fullest.rows), fullest.num_tokens) == (limits.max_rows, limits.max_tokens)


def test_a_step_that_exceeds_the_memory_is_an_error(
    folder: Path, pretended_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_for_runner(config(enable_chunked_prefill=False), folder, SingleRank())

    def out_of_memory(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(warm_up, "rehearse", out_of_memory)
    with pytest.raises(ConfigError, match="a step of 67 tokens; lower max_model_len, or let prompts be chunked"):
        free_cuda_bytes(loaded)
