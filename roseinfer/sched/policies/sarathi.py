"""Sarathi: a fixed token budget. Every running request decodes, and prompts share the rest in order of arrival.

From Sarathi-Serve (OSDI 2024). The budget bounds the step time, whatever the objectives of requests are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.request import Request
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.common.rotation import DecodeRotation
from roseinfer.sched.policies.fifo import FifoDecision
from roseinfer.sched.policy import Decision, Ended, Event, Verdict, View
from roseinfer.sched.prefill import PrefillOptions
from roseinfer.sched.registry import register


@dataclass(frozen=True, kw_only=True)
class SarathiOptions(PrefillOptions):
    sarathi_token_budget: int = option(512, "tokens of a step; prompts get what decoding requests leave")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sarathi_token_budget")


# The best budget depends on the machine and the objectives.
COMPARED = tuple({"sarathi_token_budget": tokens} for tokens in (256, 512, 1024, 2048))


@register("sarathi", options=SarathiOptions, contenders={"sarathi": COMPARED})
class SarathiPolicy:
    def __init__(self, config: SchedulerConfig, options: SarathiOptions, known: Estimates | None = None) -> None:
        self._config = config
        self._options = options
        self._rotation = DecodeRotation(options)

    def begin(self, view: View) -> Decision:
        return SarathiDecision(self._config, self._options, self._rotation, view)

    def observe(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._rotation.forget(event.request_id)


class SarathiDecision(FifoDecision):
    """FIFO decision whose prompt tokens end when the step holds `sarathi_token_budget` tokens."""

    def __init__(self, config: SchedulerConfig, options: SarathiOptions, rotation: DecodeRotation, view: View) -> None:
        super().__init__(config, options, rotation, view)
        self._left = options.sarathi_token_budget - len(view.running)

    def select(self, running: Sequence[Request]) -> Iterable[Request]:
        chosen = list(super().select(running))
        filling = sum(1 for request in chosen if request.remaining > 1)
        self._left = max(0, self._left) + filling  # the budget counts decoding rows, but never excludes them
        return chosen

    def chunk(self, request: Request, room: int) -> int:
        taken = min(super().chunk(request, room), self._left)
        self._left -= taken
        return taken

    def admit(self, request: Request) -> Verdict:
        return super().admit(request) if self._left > 0 else Verdict.STOP
