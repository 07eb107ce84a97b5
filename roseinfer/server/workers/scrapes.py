"""Metrics of all workers together, which any worker may be asked for."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from roseinfer.server.observe.exposition import Snapshot, combined
from roseinfer.server.observe.metric_registry import Numbers, total
from roseinfer.server.workers.messages import (
    CollectedMetrics,
    CollectMetrics,
    FromManager,
    MetricsReply,
    MetricsRequest,
)

# A worker that does not reply in time counts with its last reply.
REPLY_TIMEOUT_S = 1.0


class WorkerPeer(Protocol):
    """Interface of `WorkerProcess`, which tests replace."""

    number: int

    def send(self, message: FromManager) -> None: ...


class ScrapeCollector:
    """Sum of all workers' metrics, in the manager. `own`: metrics of the manager itself.

    Counts never go back: the last known counts of a worker that has ended remain.
    """

    def __init__(self, own: Callable[[], Snapshot]) -> None:
        self._own = own
        self._last: dict[int, Snapshot] = {}
        self._ended: Numbers = {}
        self._pending: dict[int, tuple[WorkerPeer, MetricsRequest, set[int]]] = {}
        self._next = 0

    def start(self, asker: WorkerPeer, scrape: MetricsRequest, others: Iterable[WorkerPeer]) -> None:
        """Ask `others` for their metrics, and reply to `asker` when all have replied, or after a timeout."""
        self._last[asker.number] = scrape.own
        number, self._next = self._next, self._next + 1
        waiting = set()
        for other in others:
            waiting.add(other.number)
            other.send(CollectMetrics(number))
        self._pending[number] = (asker, scrape, waiting)
        asyncio.get_running_loop().call_later(REPLY_TIMEOUT_S, self._reply, number)
        self._reply_if_complete(number)

    def on_collected(self, peer: WorkerPeer, message: CollectedMetrics) -> None:
        self._last[peer.number] = message.own
        self._stop_waiting(peer, [message.number])

    def on_end(self, peer: WorkerPeer) -> None:
        """Keep the counts of a worker that has ended, and do not wait for it."""
        last = self._last.pop(peer.number, None)
        if last is not None:
            self._ended = total([self._ended, last.numbers])
        self._stop_waiting(peer, list(self._pending))

    def _stop_waiting(self, peer: WorkerPeer, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._pending:
                self._pending[number][2].discard(peer.number)
                self._reply_if_complete(number)

    def _reply_if_complete(self, number: int) -> None:
        if not self._pending[number][2]:
            self._reply(number)

    def _reply(self, number: int) -> None:
        found = self._pending.pop(number, None)
        if found is not None:
            asker, scrape, _ = found
            parts = [self._own(), Snapshot(self._ended), *self._last.values()]
            asker.send(MetricsReply(scrape.number, combined(parts)))
