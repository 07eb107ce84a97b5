"""Looking on while steps run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from roseinfer.core.plan import StepPlan

# What the host does for a step, in order; `prepare` is a part of `submit` or of `forward`, `forward` one of `submit`.
PHASES = ("plan", "submit", "prepare", "forward", "sample", "collect", "commit")


# Holds while the host is in the named phase; `StepObserver.span` is one.
Span = Callable[[str], AbstractContextManager[object]]
# The span of what nobody looks at: one context for all phases, without a call of ours in each.
unobserved: Span = dict.fromkeys(PHASES, nullcontext()).__getitem__


class StepObserver(Protocol):
    """Is told of every step, in the thread that runs it."""

    def span(self, phase: str) -> AbstractContextManager[object]:
        """Holds while the host is in a phase of `PHASES`. Spans nest."""
        ...

    def step_begins(self, plan: StepPlan) -> None:
        """The plan is about to be submitted. With two steps in flight the one before it has not ended yet."""
        ...

    def step_ends(self, plan: StepPlan) -> None:
        """The plan's result has been collected."""
        ...

    def close(self) -> None:
        """There will be no more steps."""
        ...
