import threading

import pytest

from roseinfer.core.errors import EngineClosedError
from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.runner.threaded import ThreadedRunner
from tests.runner.tiny import Bench

PROMPTS = {0: [3, 1, 4, 1, 5], 1: [9, 2, 6], 2: [5, 3, 5, 8, 9, 7]}
PARAMS = {0: {}, 1: {"temperature": 1.0, "seed": 3}, 2: {"temperature": 0.8, "top_k": 5, "presence_penalty": 1.0}}


def plans(bench: Bench, steps: int) -> list[StepPlan]:
    """Plan prefill and decode of three requests without looking at results."""
    admitted = [bench.admit(s, p, logprobs=1, **PARAMS[s]) for s, p in PROMPTS.items()]
    made = [bench.plan(admitted, [bench.row(s, 0, len(p)) for s, p in PROMPTS.items()])]
    for step in range(steps):
        made.append(bench.plan([], [bench.row(s, len(p) + step, 1) for s, p in PROMPTS.items()]))
    return made


def run_depth_2(runner, plans: list[StepPlan]) -> list[StepResult]:
    results, waiting = [], []
    for plan in plans:
        handle = runner.submit(plan)
        runner.sample(handle)
        waiting.append(handle)
        if len(waiting) == 2:
            results.append(runner.collect(waiting.pop(0)))
    return results + [runner.collect(handle) for handle in waiting]


def test_equals_the_plain_runner():
    bench = Bench()
    plain = run_depth_2(bench.runner, plans(bench, 10))
    other = Bench()
    threaded = ThreadedRunner(other.runner)
    results = run_depth_2(threaded, plans(other, 10))
    threaded.close()
    assert [r.rows for r in results] == [r.rows for r in plain]
    assert [r.step for r in results] == [r.step for r in plain]


class Recording:
    """Records which thread calls; the step numbered `fail_at` fails in `where`."""

    def __init__(self, fail_at: int = -1, where: str = "submit") -> None:
        self.fail_at, self.where = fail_at, where
        self.gate = threading.Event()
        self.threads: set[int] = set()
        self.steps: list[int] = []
        self.closed = 0

    def _call(self, where: str, step: int) -> None:
        self.threads.add(threading.get_ident())
        self.steps.append(step)
        if (where, step) == (self.where, self.fail_at):
            raise ValueError(f"step {step} failed")

    def submit(self, plan: StepPlan) -> int:
        self.gate.wait(30)
        self._call("submit", plan.step)
        return plan.step

    def sample(self, handle: int, masks: TokenMasks | None = None) -> None:
        self._call("sample", handle)

    def collect(self, handle: int) -> StepResult:
        self._call("collect", handle)
        return StepResult(handle, [])

    def close(self) -> None:
        self.closed += 1


def test_the_caller_continues_while_a_step_runs():
    inner = Recording()
    runner = ThreadedRunner(inner)
    handles = []
    for step in range(2):
        handles.append(runner.submit(StepPlan(step, [])))
        runner.sample(handles[-1])
    assert not inner.threads  # the first submit is still blocked, both calls returned
    inner.gate.set()
    assert [runner.collect(h).step for h in handles] == [0, 1]
    assert len(inner.threads) == 1
    assert threading.get_ident() not in inner.threads
    runner.close()


@pytest.mark.parametrize("where", ["submit", "sample", "collect"])
def test_a_failure_reaches_collect_and_every_later_step(where):
    inner = Recording(1, where)
    inner.gate.set()
    runner = ThreadedRunner(inner)
    handles = []
    for step in range(3):
        handles.append(runner.submit(StepPlan(step, [])))
        runner.sample(handles[-1])
    assert runner.collect(handles[0]).step == 0
    for handle in handles[1:]:
        with pytest.raises(ValueError, match="step 1 failed"):
            runner.collect(handle)
    assert 2 not in inner.steps
    runner.close()


def test_close_joins_and_nothing_hangs_after_it():
    inner = Recording()
    inner.gate.set()
    before = set(threading.enumerate())
    runner = ThreadedRunner(inner)
    assert set(threading.enumerate()) - before
    done = runner.submit(StepPlan(0, []))
    runner.sample(done)
    unsampled = runner.submit(StepPlan(1, []))
    runner.close()
    runner.close()
    assert inner.closed == 1
    assert not set(threading.enumerate()) - before
    assert runner.collect(done).step == 0
    with pytest.raises(EngineClosedError):
        runner.collect(unsampled)
