"""Hooks to observe steps while they run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from roseinfer.core.plan import StepPlan

# Phases of the host's work for a step. `prepare` is part of `submit` or `forward`, `forward` part of `submit`.
PHASES = ("plan", "submit", "prepare", "forward", "sample", "collect", "commit")

# Return a context manager for the named phase; `StepObserver.span` is one.
Span = Callable[[str], AbstractContextManager[object]]
# The span without an observer: one shared context, without a Python call in each phase.
unobserved: Span = dict.fromkeys(PHASES, nullcontext()).__getitem__


class StepObserver(Protocol):
    """Callbacks for every step, called in the thread that runs it."""

    def span(self, phase: str) -> AbstractContextManager[object]:
        """Return a context for one of `PHASES`. Spans nest."""
        ...

    def step_begins(self, plan: StepPlan) -> None:
        """Called before `plan` is submitted. With two steps in flight the previous one may still run."""
        ...

    def step_ends(self, plan: StepPlan) -> None:
        """Called after the result of `plan` was collected."""
        ...

    def close(self) -> None:
        """Called after the last step."""
        ...
