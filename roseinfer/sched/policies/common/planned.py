"""Decisions that are made as a whole: rows, chunks, starts and rejections of one step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from roseinfer.core.request import Request, Status
from roseinfer.core.slo import Cause
from roseinfer.sched.policy import RejectedRequest, Verdict


@dataclass(slots=True)
class PlannedDecision:
    """Decision from lists. `rows`: running requests that compute, in order. `chunks`: prompt tokens by request id.

    `victim_key`: the running request with the largest key is preempted first if blocks run out. `yields`: requests to
    preempt now.
    """

    rows: Iterable[Request]
    chunks: Mapping[str, int]
    starts: Sequence[Request] = ()
    rejected: Sequence[RejectedRequest] = ()
    victim_key: Callable[[Request], float] | None = None
    yields: Sequence[Request] = ()

    def rejections(self) -> Iterable[RejectedRequest]:
        return self.rejected

    def preemptions(self) -> Iterable[Request]:
        return self.yields

    def select(self, running: Sequence[Request]) -> Iterable[Request]:
        return self.rows

    def chunk(self, request: Request, room: int) -> int:
        return min(room, self.chunks.get(request.request_id, 0))

    def victim(self, running: Sequence[Request]) -> Request | None:
        if not running:
            return None
        return running[-1] if self.victim_key is None else max(running, key=self.victim_key)

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        # A request that has a seat by then, or waits for a load, was handled as a sample of another one.
        return (request for request in self.starts if request.seat is None and not request.loading)

    def admit(self, request: Request) -> Verdict:
        return Verdict.ADMIT if request.request_id in self.chunks else Verdict.SKIP


@dataclass(slots=True)
class ExplainedDecision(PlannedDecision):
    """Planned decision that also names what waiting requests wait for (`Explaining`). `cause_changes`: causes that have
    changed. `unnamed_cause`: that of all requests that were never named.
    """

    cause_changes: Iterable[tuple[Request, Cause]] = field(kw_only=True)
    unnamed_cause: Cause = field(kw_only=True)

    def wait_causes(self) -> Iterable[tuple[Request, Cause]]:
        return self.cause_changes

    def default_cause(self) -> Cause:
        return self.unnamed_cause


class CauseUpdates:
    """Requests with a cause other than the default. A policy names each of them again in every step while it waits.

    A request that has no cause of its own any more is named with the default cause. There are few such requests.
    """

    def __init__(self) -> None:
        self._named: dict[Request, Cause] = {}

    def update(self, own: Mapping[Request, Cause], default_cause: Cause) -> Iterable[tuple[Request, Cause]]:
        waiting = {request: default_cause for request in self._named if request.status is Status.WAITING}
        self._named = {**waiting, **own}
        return self._named.items()
