"""A runner that someone looks at."""

from typing import Any, NamedTuple

from roseinfer.core.observer import StepObserver
from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import PassThrough, Runner


class ObservedHandle(NamedTuple):
    plan: StepPlan
    inner: Any


class ObservedRunner(PassThrough):
    """Every call is a span. What a runner does within its calls it shows itself: `ModelRunner.observe`."""

    def __init__(self, inner: Runner, observer: StepObserver) -> None:
        super().__init__(inner)
        self._observer = observer

    def submit(self, plan: StepPlan) -> ObservedHandle:
        self._observer.step_begins(plan)
        with self._observer.span("submit"):
            return ObservedHandle(plan, self.inner.submit(plan))

    def sample(self, handle: ObservedHandle, masks: TokenMasks | None = None) -> None:
        with self._observer.span("sample"):
            self.inner.sample(handle.inner, masks)

    def collect(self, handle: ObservedHandle) -> StepResult:
        with self._observer.span("collect"):
            result = self.inner.collect(handle.inner)
        self._observer.step_ends(handle.plan)
        return result

    def close(self) -> None:
        self._observer.close()
        self.inner.close()
