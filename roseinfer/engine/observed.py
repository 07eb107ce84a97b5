"""A scheduler that someone looks at."""

from typing import Any

from roseinfer.core.observer import StepObserver
from roseinfer.core.outputs import RequestOutput
from roseinfer.core.plan import StepPlan, StepResult
from roseinfer.sched.scheduler import Scheduler


class ObservedScheduler(Scheduler):
    """`plan` and `commit` are spans of `observer`; the other arguments are those of `Scheduler`."""

    def __init__(self, observer: StepObserver, *args: Any) -> None:
        super().__init__(*args)
        self._observer = observer

    def plan(self, now_s: float) -> StepPlan | None:
        with self._observer.span("plan"):
            return super().plan(now_s)

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[RequestOutput]:
        with self._observer.span("commit"):
            return super().commit(plan, result, now_s)
