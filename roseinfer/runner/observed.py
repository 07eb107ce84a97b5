"""A runner that someone looks at: its calls, and what it does within them, are spans."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from roseinfer.core.observer import StepObserver
from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import PassThrough, Runner

PACKAGE = "roseinfer.runner"


class ObservedHandle(NamedTuple):
    plan: StepPlan
    inner: Any


class ObservedRunner(PassThrough):
    """Every call is a span, and so is what the runner within does in it."""

    def __init__(self, inner: Runner, observer: StepObserver) -> None:
        super().__init__(inner)
        self._observer = observer
        _observe_inside(inner, observer)

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


def _observe_inside(runner: Any, observer: StepObserver) -> None:
    """Make spans of what a runner does within `submit`.

    Methods are replaced on the objects that have them, so that a runner that nobody looks at does not even ask whether
    somebody does. A phase `prepare` is each `_change_state`, `_prepare` and `stage_...` of the runner and of its parts.
    """
    for part in _parts(runner):
        names = ("_change_state", "_prepare", *(name for name in dir(type(part)) if name.startswith("stage_")))
        for name in names:
            _observe(part, name, "prepare", observer)
    forward = getattr(runner, "_forward_pass", None)
    if forward is not None:
        _observe(forward, "run", "forward", observer)


def _parts(runner: Any) -> list[Any]:
    """The runner and the objects of its package that it is made of."""
    found, seen, ahead = [], set(), [runner]
    while ahead:
        part = ahead.pop()
        if id(part) in seen or not type(part).__module__.startswith(PACKAGE) or not hasattr(part, "__dict__"):
            continue
        seen.add(id(part))
        found.append(part)
        ahead += vars(part).values()
    return found


def _observe(owner: Any, name: str, phase: str, observer: StepObserver) -> None:
    inner: Callable[..., Any] | None = getattr(owner, name, None)
    if inner is None:
        return

    @wraps(inner)
    def observed(*args: Any, **kwargs: Any) -> Any:
        with observer.span(phase):
            return inner(*args, **kwargs)

    setattr(owner, name, observed)
