"""Metrics of all workers together, which any worker may be asked for."""

from collections.abc import Callable, Iterable

from roseinfer.server.observe.exposition import Snapshot, combined
from roseinfer.server.observe.metric_registry import Numbers, total
from roseinfer.server.workers.messages import CollectedMetrics, CollectMetrics, MetricsReply, MetricsRequest
from roseinfer.server.workers.replies import FanOut, WorkerPeer


class ScrapeCollector:
    """Sum of all workers' metrics, in the manager. `own`: metrics of the manager itself.

    Counts never go back: a worker that does not reply in time, or has ended, counts with its last reply.
    """

    def __init__(self, own: Callable[[], Snapshot]) -> None:
        self._own = own
        self._last: dict[int, Snapshot] = {}
        self._ended: Numbers = {}
        self._collected = FanOut[Snapshot]()

    def start(self, asker: WorkerPeer, scrape: MetricsRequest, others: Iterable[WorkerPeer]) -> None:
        """Ask `others` for their metrics, and reply to `asker` when all have replied, or after a timeout."""
        self._last[asker.number] = scrape.own
        self._collected.start(others, CollectMetrics, lambda _: asker.send(MetricsReply(scrape.number, self._all())))

    def on_collected(self, peer: WorkerPeer, message: CollectedMetrics) -> None:
        self._last[peer.number] = message.own
        self._collected.on_reply(peer, message.number, message.own)

    def on_end(self, peer: WorkerPeer) -> None:
        """Keep the counts of a worker that has ended, and do not wait for it."""
        last = self._last.pop(peer.number, None)
        if last is not None:
            self._ended = total([self._ended, last.numbers])
        self._collected.on_end(peer)

    def _all(self) -> Snapshot:
        return combined([self._own(), Snapshot(self._ended), *self._last.values()])
