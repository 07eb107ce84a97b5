"""FIFO: requests start in order of arrival within the prefill budget, and the youngest is preempted first.

A request that exceeds the rest of the budget stays at the head of the queue for the next step.
"""

from collections.abc import Iterable, Sequence

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.common.rotation import DecodeRotation
from roseinfer.sched.policy import Decision, Ended, Event, RejectedRequest, Verdict, View
from roseinfer.sched.prefill import PrefillBudget, PrefillOptions
from roseinfer.sched.registry import register


@register("fifo", options=PrefillOptions)
class FifoPolicy:
    """First-in, first-out policy. `rotation` selects the running requests that compute; by default all of them."""

    def __init__(
        self,
        config: SchedulerConfig,
        options: PrefillOptions,
        known: Estimates | None = None,
        rotation: DecodeRotation | None = None,
    ) -> None:
        self._config = config
        self._options = options
        self._rotation = rotation or DecodeRotation(options)

    def begin(self, view: View) -> Decision:
        return FifoDecision(self._config, self._options, self._rotation, view)

    def observe(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._rotation.forget(event.request_id)


class FifoDecision:
    """FIFO decision for one step. Other policies derive from it and change the order of admission."""

    def __init__(self, config: SchedulerConfig, options: PrefillOptions, rotation: DecodeRotation, view: View) -> None:
        self.budget = PrefillBudget(config, options, view)
        self._chunk_limit = options.long_prefill_token_threshold
        self._rotation = rotation
        self._view = view

    def token_budget(self) -> int:
        return self._view.token_budget

    def rejections(self) -> Iterable[RejectedRequest]:
        return ()

    def select(self, running: Sequence[Request]) -> Iterable[Request]:
        return self._rotation.select(running, self._view, self.budget)

    def chunk(self, request: Request, room: int) -> int:
        if self._chunk_limit:
            room = min(room, self._chunk_limit)
        if request.status is Status.WAITING:
            return self.budget.first_chunk(room)
        return self.budget.next_chunk(room)

    def victim(self, running: Sequence[Request]) -> Request | None:
        return running[-1] if running else None

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return waiting

    def admit(self, request: Request) -> Verdict:
        return Verdict.ADMIT if self.budget.start(request) else Verdict.STOP

    def wait_causes(self) -> Iterable[tuple[Request, Cause]]:
        return ()  # all wait for the default cause

    def default_cause(self) -> Cause:
        return self.budget.next_cause
