"""Exact timelines of the sequences of one engine core, from its plans and the policy's events."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from roseinfer.core.outputs import End, FirstToken, SequenceOutput
from roseinfer.core.plan import StepPlan, StepResult
from roseinfer.engine.core import EngineCore
from roseinfer.sched.policy import Admitted, Decision, Ended, Event, Policy, Queued, View

Span = tuple[float, float]


class Step(NamedTuple):
    """Step with the time from its plan to its result."""

    number: int
    span: Span
    seated: frozenset[str]
    rows: frozenset[str]


@dataclass
class Timeline:
    """Timeline of one sequence. `seats`: spans with a seat; `tokens`: step and time of each token."""

    arrival_s: float
    seats: list[Span] = field(default_factory=list)
    tokens: list[tuple[int, float]] = field(default_factory=list)
    started: FirstToken | None = None
    end: End | None = None


class Phase(NamedTuple):
    """Seconds and steps of a phase: without a seat, with a seat but in no submitted step, and the rest."""

    waited: float
    sat_out: float
    ran: float
    steps: int
    missed: int


class Recorder:
    """Record of a core's steps and sequences. It stands between the core and its scheduler's policy."""

    def __init__(self, core: EngineCore) -> None:
        self._policy: Policy = core.scheduler.policy
        self._clock = core.clock
        self._scheduler = core.scheduler
        self._planned: dict[int, tuple[float, frozenset[str]]] = {}
        self._seated_s: dict[str, float] = {}
        self.steps: list[Step] = []
        self.found: dict[str, Timeline] = {}
        scheduler: Any = core.scheduler
        self._plan, self._commit = scheduler.plan, scheduler.commit
        scheduler.plan, scheduler.commit, scheduler.policy = self.plan, self.commit, self

    # --- policy -------------------------------------------------------------------------------------------------
    def begin(self, view: View) -> Decision:
        return self._policy.begin(view)

    def observe(self, event: Event) -> None:
        self._policy.observe(event)
        if isinstance(event, Queued):
            request = event.request
            self.found.setdefault(request.request_id, Timeline(request.arrival_s))
            self._leave(request.request_id, self._clock.now())
        elif isinstance(event, Admitted):
            self._seated_s[event.request_id] = event.now_s
        elif isinstance(event, Ended):
            self._leave(event.request_id, event.now_s)

    def _leave(self, name: str, now_s: float) -> None:
        if name in self._seated_s:
            self.found[name].seats.append((self._seated_s.pop(name), now_s))

    # --- scheduler ----------------------------------------------------------------------------------------------
    def plan(self, now_s: float) -> StepPlan | None:
        plan: StepPlan | None = self._plan(now_s)
        if plan is not None:
            self._planned[plan.step] = now_s, frozenset(self._scheduler.running)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[SequenceOutput]:
        planned_s, seated = self._planned.pop(plan.step)
        self.steps.append(Step(plan.step, (planned_s, now_s), seated, frozenset(row.request_id for row in plan.rows)))
        outputs: list[SequenceOutput] = self._commit(plan, result, now_s)
        for output in outputs:
            timeline = self.found[output.request_id]
            timeline.tokens += [(plan.step, now_s)] * len(output.token_ids)
            timeline.started = timeline.started or output.started
            timeline.end = output.end
        return outputs

    def phase(self, name: str, span: Span, steps: tuple[int, int]) -> Phase:
        """Return what a sequence did in a span of time, and in the steps from one number up to before another."""
        timeline = self.found[name]
        seats = [_common(seat, span) for seat in timeline.seats]
        seat_s = _length(seats)
        own = [step.span for step in self.steps if name in step.rows]
        ran_s = _length(_common(each, seat) for each in own for seat in seats)
        counted = [step for step in self.steps if steps[0] <= step.number < steps[1] and name in step.seated]
        missed = sum(name not in step.rows for step in counted)
        return Phase(span[1] - span[0] - seat_s, seat_s - ran_s, ran_s, len(counted), missed)


def _common(a: Span, b: Span) -> Span:
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return start, max(start, end)


def _length(spans: Iterable[Span]) -> float:
    """Return the length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
