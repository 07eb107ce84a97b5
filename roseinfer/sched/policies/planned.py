"""A decision that was made as a whole: who computes how much, who starts, who is turned away."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from roseinfer.core.request import Request
from roseinfer.core.slo import Rejection
from roseinfer.sched.policy import Verdict


class PlannedDecision:
    """`rows`: the running requests that compute, in order. `chunks`: prompt tokens by request id, for running and
    starting ones alike. `victim_key`: who yields first has the largest.
    """

    def __init__(
        self,
        rows: Iterable[Request],
        chunks: Mapping[str, int],
        starts: Sequence[Request] = (),
        rejections: Sequence[tuple[Request, Rejection]] = (),
        victim_key: Callable[[Request], float] | None = None,
    ) -> None:
        self._rows = rows
        self._chunks = chunks
        self._starts = starts
        self._rejected = {request.request_id: rejection for request, rejection in rejections}
        self._rejections = rejections
        self._victim_key = victim_key

    def select(self, running: Collection[Request]) -> Iterable[Request]:
        return self._rows

    def chunk(self, request: Request, room: int) -> int:
        return min(room, self._chunks.get(request.request_id, 0))

    def victim(self, running: Collection[Request]) -> Request | None:
        candidates = list(running)
        if not candidates:
            return None
        return candidates[-1] if self._victim_key is None else max(candidates, key=self._victim_key)

    def order(self, waiting: Iterable[Request]) -> Iterable[Request]:
        return [*(request for request, _ in self._rejections), *self._starts]

    def admit(self, request: Request) -> Verdict | Rejection:
        return self._rejected.get(request.request_id, Verdict.ADMIT)
