"""A decision that was made as a whole: who computes how much, who starts, who is turned away."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause
from roseinfer.sched.policy import RejectedRequest, Verdict


class PlannedDecision:
    """`rows`: the running requests that compute, in order. `chunks`: prompt tokens by request id, for running and
    starting ones alike. `victim_key`: who yields first has the largest, where blocks run out. `yields`: who makes room
    now.
    """

    def __init__(
        self,
        rows: Iterable[Request],
        chunks: Mapping[str, int],
        starts: Sequence[Request] = (),
        rejections: Sequence[RejectedRequest] = (),
        victim_key: Callable[[Request], float] | None = None,
        yields: Sequence[Request] = (),
    ) -> None:
        self._rows = rows
        self._chunks = chunks
        self._starts = starts
        self._rejections = rejections
        self._victim_key = victim_key
        self._yields = yields

    def rejections(self) -> Iterable[RejectedRequest]:
        return self._rejections

    def preemptions(self) -> Iterable[Request]:
        return self._yields

    def select(self, running: Sequence[Request]) -> Iterable[Request]:
        return self._rows

    def chunk(self, request: Request, room: int) -> int:
        return min(room, self._chunks.get(request.request_id, 0))

    def victim(self, running: Sequence[Request]) -> Request | None:
        if not running:
            return None
        return running[-1] if self._victim_key is None else max(running, key=self._victim_key)

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        # One that has a seat by then, or waits for a load, was dealt with as a sample of another.
        return (request for request in self._starts if request.seat is None and not request.loading)

    def admit(self, request: Request) -> Verdict:
        return Verdict.ADMIT if request.request_id in self._chunks else Verdict.SKIP


class ExplainedDecision(PlannedDecision):
    """One that also says what those wait for who do not start (`Explaining`), once it was told by `say`."""

    def say(self, news: Iterable[tuple[Request, Cause]], line: Cause) -> None:
        """`news`: who waits for something else than before, and for what. `line`: what the others wait for."""
        self._news, self._line = news, line

    def wait_causes(self) -> Iterable[tuple[Request, Cause]]:
        return self._news

    def default_cause(self) -> Cause:
        return self._line


class CauseUpdates:
    """Requests for which a policy has named a cause that is not the line's. Each is named again as long as it waits,
    with the line's if it has none of its own any more: few, since others are not told apart.
    """

    def __init__(self) -> None:
        self._named: dict[Request, Cause] = {}

    def news(self, own: Mapping[Request, Cause], line: Cause) -> Iterable[tuple[Request, Cause]]:
        waiting = {request: line for request in self._named if request.status is Status.WAITING}
        self._named = {**waiting, **own}
        return self._named.items()
