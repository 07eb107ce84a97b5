"""Packing: short prompts overtake long ones, so that many requests start within one step's prefill budget.

Of the first `prefill_admission_lookahead` waiting requests the cheapest are chosen (ties by arrival) while seats and
`prefill_max_tokens` last, and those that do not fit are skipped. The chosen requests start in order of arrival, and the
others keep their order. If nothing fits, the head of the queue runs alone. Without a token budget this is FIFO.

A long prompt is not skipped forever. Each `prefill_force_fifo_every`th step admits in order of arrival, and so do the
steps after it until a request starts. A request that was overtaken in `prefill_max_skips` steps goes next.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.common.rotation import DecodeRotation
from roseinfer.sched.policies.fifo import FifoDecision
from roseinfer.sched.policy import Admitted, Decision, Ended, Event, View
from roseinfer.sched.prefill import PrefillOptions, check_not_negative
from roseinfer.sched.registry import register


@dataclass(frozen=True, kw_only=True)
class PackOptions(PrefillOptions):
    prefill_admission_lookahead: int = option(64, "waiting requests considered in a step")
    prefill_force_fifo_every: int = option(0, "each Nth step admits in order of arrival; 0 = never")
    prefill_max_skips: int = option(256, "a request that was overtaken in so many steps goes next; 0 = unlimited")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "prefill_admission_lookahead")
        check_not_negative(self, "prefill_force_fifo_every", "prefill_max_skips")


@register("pack", options=PackOptions)
class PackPolicy:
    """Policy that counts steps with waiting requests, and how often each of these was overtaken."""

    def __init__(self, config: SchedulerConfig, options: PackOptions, known: Estimates | None = None) -> None:
        self._config = config
        self._options = options
        self._rotation = DecodeRotation(options)
        self._steps = 0  # with waiting requests, since a request last started in a forced step
        self._forced = False
        self.overdue = False  # the last choice was a request that had been overtaken too often
        self._skips: dict[str, int] = {}

    def begin(self, view: View) -> Decision:
        if not view.num_waiting:
            return FifoDecision(self._config, self._options, self._rotation, view)
        self._steps += 1
        self._forced = 0 < self._options.prefill_force_fifo_every <= self._steps
        if self._forced or self._options.prefill_max_tokens is None:
            return FifoDecision(self._config, self._options, self._rotation, view)
        return PackDecision(self._config, self._options, self._rotation, view, self)

    def observe(self, event: Event) -> None:
        if isinstance(event, Admitted) and self._forced:
            self._steps = 0
        if isinstance(event, Admitted | Ended):
            self._skips.pop(event.request_id, None)
        if isinstance(event, Ended):
            self._rotation.forget(event.request_id)

    def choose(self, decision: FifoDecision, waiting: Sequence[Request]) -> list[Request]:
        """Return the requests that start now, in order of arrival, and count those that they overtake."""
        window = waiting[: self._options.prefill_admission_lookahead]
        if not window:
            return []
        overdue = self._overdue(window)
        self.overdue = overdue is not None
        chosen = {overdue} if overdue is not None else self._cheapest(decision, window)
        last = max(chosen)
        for index, request in enumerate(window[:last]):
            if index not in chosen:
                self._skips[request.request_id] = self._skips.get(request.request_id, 0) + 1
        return [window[index] for index in sorted(chosen)]

    def _overdue(self, window: Sequence[Request]) -> int | None:
        most = self._options.prefill_max_skips
        if not most:
            return None
        late = (i for i, request in enumerate(window) if self._skips.get(request.request_id, 0) >= most)
        return next(late, None)

    def _cheapest(self, decision: FifoDecision, window: Sequence[Request]) -> set[int]:
        """Return the indices of the cheapest requests that fit together; the head alone if none does."""
        budget = decision.budget
        costs = [budget.cost(request) for request in window]
        tokens_left, starts_left = budget.tokens_left or 0, budget.starts_left
        chosen: set[int] = set()
        for index in sorted(range(len(window)), key=costs.__getitem__):
            if len(chosen) >= starts_left or costs[index] > tokens_left:
                break
            tokens_left -= costs[index]
            chosen.add(index)
        return chosen or {0}


class PackDecision(FifoDecision):
    def __init__(
        self, config: SchedulerConfig, options: PackOptions, rotation: DecodeRotation, view: View, policy: PackPolicy
    ) -> None:
        super().__init__(config, options, rotation, view)
        self._policy = policy

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return [] if self.budget.closed else self._policy.choose(self, waiting)

    def default_cause(self) -> Cause:
        return Cause.QUEUE if self._policy.overdue and not self.budget.closed else super().default_cause()
