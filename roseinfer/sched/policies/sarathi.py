"""A fixed token budget: every running request decodes, and prompts share what is left of it, by arrival.

Sarathi-Serve (OSDI 2024): the budget bounds the step time, whatever the requests were promised.
"""

from collections.abc import Iterable, Sequence

from roseinfer.core.config import SchedulerConfig
from roseinfer.core.events import Ended, Event
from roseinfer.core.request import Request
from roseinfer.sched.policies.fifo import FifoDecision
from roseinfer.sched.policies.rotation import Rotation
from roseinfer.sched.policy import Decision, Verdict, View


class SarathiPolicy:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._rotation = Rotation(config)

    def begin(self, view: View) -> Decision:
        return SarathiDecision(self._config, self._rotation, view)

    def observe(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._rotation.forget(event.request_id)


class SarathiDecision(FifoDecision):
    """FIFO, but prompt tokens stop when the step holds `sarathi_token_budget` tokens."""

    def __init__(self, config: SchedulerConfig, rotation: Rotation, view: View) -> None:
        super().__init__(config, rotation, view)
        self._left = config.sarathi_token_budget - len(view.running)

    def select(self, running: Sequence[Request]) -> Iterable[Request]:
        chosen = list(super().select(running))
        filling = sum(1 for request in chosen if request.remaining > 1)
        self._left = max(0, self._left) + filling  # the budget counts decoding rows, and those are served all the same
        return chosen

    def chunk(self, request: Request, room: int) -> int:
        taken = min(super().chunk(request, room), self._left)
        self._left -= taken
        return taken

    def admit(self, request: Request) -> Verdict:
        return super().admit(request) if self._left > 0 else Verdict.STOP
