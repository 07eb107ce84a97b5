"""First in, first out: decode rows and the oldest prompts first; the youngest yields."""

from collections.abc import Collection, Iterable

from roseinfer.core.events import Event
from roseinfer.core.request import Request
from roseinfer.sched.policy import Decision, Verdict, View


class FifoPolicy:
    """`chunk_limit`: the longest chunk of one prompt in a step, 0 = as much as the step has room for.

    It keeps no state, so it is its own decision.
    """

    def __init__(self, chunk_limit: int = 0) -> None:
        self._chunk_limit = chunk_limit

    def begin(self, view: View) -> Decision:
        return self

    def observe(self, event: Event) -> None:
        pass

    def select(self, running: Collection[Request]) -> Iterable[Request]:
        return running

    def chunk(self, request: Request, room: int) -> int:
        return min(room, self._chunk_limit) if self._chunk_limit else room

    def victim(self, running: Collection[Request]) -> Request | None:
        return list(running)[-1] if running else None

    def order(self, waiting: Collection[Request]) -> Iterable[Request]:
        return waiting

    def admit(self, request: Request) -> Verdict:
        return Verdict.ADMIT
