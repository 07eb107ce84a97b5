"""One protocol for runners, and one place through which wrappers hand its calls on."""

from array import array
from typing import Protocol

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import Capabilities, PassThrough, Runner
from roseinfer.engine.record import RecordingRunner
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.runner.threaded import ThreadedRunner
from roseinfer.runner.trace import ObservedRunner
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.engine import FixedLengthRunner
from roseinfer.sim.replay import RecordedRunner


class Told:
    """A runner that writes down what it is told."""

    capabilities = Capabilities(drafts=True, masks=True)

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def submit(self, plan: StepPlan) -> str:
        self.calls.append(("submit", plan))
        return "handle"

    def mask_space(self, lines: int) -> memoryview:
        self.calls.append(("mask_space", lines))
        return memoryview(bytes(4 * lines))

    def sample(self, handle: str, masks: TokenMasks | None = None) -> None:
        self.calls.append(("sample", handle, masks))

    def collect(self, handle: str) -> StepResult:
        self.calls.append(("collect", handle))
        return StepResult(3, [])

    def close(self) -> None:
        self.calls.append(("close",))


class Silent:
    """An observer."""

    def span(self, phase: str):
        from contextlib import nullcontext

        return nullcontext()

    def step_begins(self, plan: StepPlan) -> None: ...

    def step_ends(self, plan: StepPlan) -> None: ...

    def close(self) -> None: ...


def members(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_pass_through_hands_on_everything_that_the_protocol_has():
    assert members(PassThrough) == members(Runner) - members(Protocol)


@pytest.mark.parametrize("wrapper", [PassThrough, RecordingRunner, ThreadedRunner, ObservedRunner, PricedRunner])
def test_a_wrapper_hands_on_all_calls_with_all_they_carry(wrapper):
    told, plan, masks = Told(), StepPlan(3, []), TokenMasks((0,), memoryview(array("I", [7])))
    assert issubclass(wrapper, PassThrough)
    further = {ObservedRunner: (Silent(),), PricedRunner: (Machine(CostParams(2.0)), ManualClock())}
    runner = wrapper(told, *further.get(wrapper, ()))
    assert runner.capabilities is told.capabilities
    handle = runner.submit(plan)
    assert len(runner.mask_space(5)) == 20
    runner.sample(handle, masks)
    assert runner.collect(handle) == StepResult(3, [], 2.0 if wrapper is PricedRunner else 0.0)
    runner.close()
    asked = [call for call in told.calls if call[0] == "mask_space"]
    assert asked == [("mask_space", 5)], "a thread's own work may come before or behind it"
    told.calls.remove(asked[0])
    assert told.calls == [("submit", plan), ("sample", "handle", masks), ("collect", "handle"), ("close",)]


@pytest.mark.parametrize("runner", [FixedLengthRunner(), RecordedRunner])
def test_runners_that_compute_nothing_neither_verify_nor_mask(runner):
    assert not runner.capabilities.drafts and not runner.capabilities.masks
