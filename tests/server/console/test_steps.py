"""The newest steps, as the console is shown them."""

import time

from roseinfer.engine.api import StepRecord
from roseinfer.server.console.steps import MAX_STEPS, steps_since
from roseinfer.server.observe.metric_registry import MetricRegistry
from roseinfer.server.observe.model_names import ModelNames
from roseinfer.server.observe.step_metrics import StepMetrics


def kept() -> StepMetrics:
    return StepMetrics(MetricRegistry(), ModelNames("model"), MAX_STEPS)


def step(tokens: int) -> StepRecord:
    return StepRecord(tokens, 0.01)


def tokens(ring: StepMetrics, count: int, most: int = MAX_STEPS) -> list[int]:
    return [shown[6] for shown in steps_since(ring, count, most).steps]


def test_a_step_as_it_is_shown() -> None:
    ring = kept()
    now_s = time.time()
    ring.step(1, StepRecord(40, 0.0123456, 0.01, 0.0, time.monotonic(), rows=9, prompt_tokens=32, budget_s=0.05))
    ring.step(0, StepRecord(1, 0.002))
    first, second = steps_since(ring, 0, 10).steps
    assert first[0] == 1 and first[2:] == (12.346, 50.0, 9, 32, 40, 10.0)
    assert abs(first[1] - now_s) < 1
    assert second[0] == 0 and second[2:] == (2.0, None, 0, 0, 1, None)


def test_only_what_is_new() -> None:
    ring = kept()
    for count in range(5):
        ring.step(0, step(count))
    assert tokens(ring, 0) == [0, 1, 2, 3, 4]
    assert tokens(ring, 3) == [3, 4]
    assert tokens(ring, 5) == [] and steps_since(ring, 5, 10).ever == 5


def test_the_newest_of_too_many() -> None:
    ring = kept()
    for count in range(MAX_STEPS + 10):
        ring.step(0, step(count))
    new = steps_since(ring, 4, 3)
    assert new.ever == MAX_STEPS + 10
    assert [shown[6] for shown in new.steps] == list(range(MAX_STEPS + 7, MAX_STEPS + 10))
    assert tokens(ring, 4) == list(range(10, MAX_STEPS + 10))
