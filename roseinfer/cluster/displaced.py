"""Requests that have lost their engine, until another engine gets them."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from roseinfer.engine.live import LiveRequest, LiveRequests

# Until then after a loss, the engines that were lost together with it are not all known yet.
SETTLE_S = 0.05
# A look that is later than this shows that the process was held up, and has yet to read of other losses.
MAX_LATE_S = 0.02
# A request without output waits this long at most until an engine accepts requests.
MAX_WAIT_S = 30.0


class Displacement(NamedTuple):
    """Loss of a request's engine. `cause`: one word for metrics. `reason`: why the engine was lost. `from_s`: time from
    which another engine may get the request. `until_s`: time until which one must be there. `is_due`: `from_s` has been
    seen to pass.
    """

    cause: str
    reason: str
    from_s: float
    until_s: float
    is_due: bool = False


class DisplacedRequests:
    """Requests that are on no engine. Those that end meanwhile, for example by their reader, are dropped."""

    def __init__(self, requests: LiveRequests) -> None:
        self._requests = requests
        self._displaced: dict[LiveRequest, Displacement] = {}

    def add(self, live: LiveRequest, cause: str, reason: str, now_s: float) -> None:
        """Add a request whose engine was lost. After a planned end (`drain`), other engines may get it at once."""
        from_s = now_s if cause == "drain" else now_s + SETTLE_S
        self._displaced[live] = Displacement(cause, reason, from_s, min(now_s + MAX_WAIT_S, _deadline_s(live)))

    def remove(self, live: LiveRequest) -> None:
        self._displaced.pop(live, None)

    def any_due(self, now_s: float) -> bool:
        """True if other engines may get some of the requests now."""
        return any(lost.from_s <= now_s for lost in self._displaced.values())

    def settled(self, now_s: float) -> Iterator[tuple[LiveRequest, Displacement]]:
        """Yield the requests that other engines may get now, in the order in which to send them."""
        self._displaced = {live: _seen(lost, now_s) for live, lost in self._displaced.items() if live in self._requests}
        for live in in_send_order([live for live, lost in self._displaced.items() if lost.from_s <= now_s]):
            if live in self._requests:  # not cancelled when another one failed
                yield live, self._displaced[live]


def _seen(lost: Displacement, now_s: float) -> Displacement:
    """Return the loss as of now: if its time passed unseen, losses of other engines are read first."""
    if lost.is_due or now_s < lost.from_s:
        return lost
    is_late = now_s > lost.from_s + MAX_LATE_S
    return lost._replace(from_s=now_s + SETTLE_S if is_late else lost.from_s, is_due=True)


def in_send_order(requests: Sequence[LiveRequest]) -> list[LiveRequest]:
    """Return the order in which the next engine gets requests. It puts each begun request before all waiting ones, so
    the begun ones are sent last first.
    """
    waiting, begun = [[live for live in requests if live.has_output is which] for which in (False, True)]
    return [*waiting, *reversed(begun)]


def _deadline_s(live: LiveRequest) -> float:
    """Return the deadline of the first token, or of the whole request if that is earlier."""
    meta = live.request.prompt.meta
    deadline_s = inf if meta.deadline_s is None else meta.deadline_s
    if meta.slo is None or meta.arrival_s is None:
        return deadline_s
    objectives_s = [each for each in (meta.slo.ttft_s, meta.slo.e2e_s) if each is not None]
    return min([deadline_s, *(meta.arrival_s + objective_s for objective_s in objectives_s)])
