"""Loads of a breakdown: every measured step has the stated shape, also with two steps in flight."""

from types import SimpleNamespace

import pytest

from benchmarks.breakdown.loads import Load, steps_of
from benchmarks.engine_step import VOCAB, NullRunner
from roseinfer.core.adapters import Adapter
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.plan import StepLimits, StepPlan
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.sched.registry import make_policy
from roseinfer.sched.scheduler import Scheduler
from tests.helpers.engine_info import engine_info
from tests.helpers.kv_managers import kv_manager


class Watched(NullRunner):
    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> StepPlan:
        if plan.rows:
            self.plans.append(plan)
        return plan


def make_core(depth: int, policy: str) -> tuple[EngineCore, Watched]:
    config = SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=320, scheduling_policy=policy)
    scheduler = Scheduler(config, kv_manager(800, 16), make_policy(config), 256, StepLimits.of(config, 256))
    runner = Watched()
    return EngineCore(scheduler, runner, MonotonicClock(), depth=depth, vocab_size=VOCAB), runner


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fifo", "slack"])
def test_every_measured_step_is_met(depth: int, policy: str) -> None:
    core, runner = make_core(depth, policy)
    llm = SimpleNamespace(core=core, info=engine_info(vocab_size=VOCAB), adapters=dict)
    loads = [Load(16, 40, 8, 7), Load(0, 40, 3, 7, 300), Load(16, 40, 3, 7, 300), Load(16, 40, 3, 7, 130)]
    for load in loads:
        steps = steps_of(llm, load)
        for _ in range(load.warm_up):
            next(steps)
        runner.plans.clear()
        for _ in range(2 * load.steps):
            next(steps)
        assert [load.is_met(plan) for plan in runner.plans] == [True] * 2 * load.steps
        steps.close()
        assert not core.busy


def test_a_batch_that_was_there_finds_its_prompts_cached() -> None:
    core, runner = make_core(1, "fifo")
    llm = SimpleNamespace(core=core, info=engine_info(vocab_size=VOCAB), adapters=dict)
    computed = []
    for _ in range(2):
        runner.plans.clear()
        steps = steps_of(llm, Load(4, 48, 2, 7))
        next(steps)
        steps.close()
        computed.append(sum(plan.num_tokens for plan in runner.plans))
    assert computed[0] >= 4 * 48 > computed[1]


def test_new_prompts_are_whole() -> None:
    assert Load(2, 40, 1, 0, 130).prompts == [40, 40, 40, 10] and Load(2, 40, 1, 0).prompts == []


@pytest.mark.parametrize(("adapted_rows", "expected"), [(None, "abab"), (3, "aba-"), (0, "----")])
def test_rows_use_adapters_in_turn(adapted_rows: int | None, expected: str) -> None:
    added: list[Add] = []
    core = SimpleNamespace(
        scheduler=SimpleNamespace(config=SimpleNamespace(max_num_batched_tokens=64)),
        add=added.append,
        busy=False,
        abort=lambda names: None,
    )
    adapters = {name: Adapter(name, name * 64, f"/{name}", 8, 1) for name in "ab"}
    info = SimpleNamespace(facts=SimpleNamespace(vocab_size=50))
    engine = SimpleNamespace(core=core, info=info, adapters=lambda: adapters)
    assert list(steps_of(engine, Load(4, 8, 1, 0, adapted_rows=adapted_rows))) == []
    used = [add.prompt.meta.adapter for add in added]
    assert "".join("-" if adapter is None else adapter.name for adapter in used) == expected
