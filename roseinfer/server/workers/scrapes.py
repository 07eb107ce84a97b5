"""The metrics of all workers together, for whichever of them is asked."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from roseinfer.server.observe.exposition import Snapshot, combined
from roseinfer.server.observe.metric_registry import Numbers, total
from roseinfer.server.workers.control import Collect, Collected, FromManager, Scrape, Scraped

# A worker that does not answer for so long counts with what it said last.
PATIENCE_S = 1.0


class Peer(Protocol):
    number: int

    def send(self, message: FromManager) -> None: ...


class Scrapes:
    """Counts never go back: what a worker had counted when it was last asked stays when it ends. `own`: the manager's
    own part.
    """

    def __init__(self, own: Callable[[], Snapshot]) -> None:
        self._own = own
        self._last: dict[int, Snapshot] = {}
        self._gone: Numbers = {}
        self._pending: dict[int, tuple[Peer, Scrape, set[int]]] = {}
        self._next = 0

    def ask(self, asker: Peer, scrape: Scrape, others: Iterable[Peer]) -> None:
        """Answers `asker` when all `others` have told what they know, or had time to."""
        self._last[asker.number] = scrape.own
        number, self._next = self._next, self._next + 1
        waiting = set()
        for other in others:
            waiting.add(other.number)
            other.send(Collect(number))
        self._pending[number] = (asker, scrape, waiting)
        asyncio.get_running_loop().call_later(PATIENCE_S, self._answer, number)
        self._answer_if_complete(number)

    def told(self, peer: Peer, message: Collected) -> None:
        self._last[peer.number] = message.own
        self._no_longer_waiting(peer, [message.number])

    def gone(self, peer: Peer) -> None:
        last = self._last.pop(peer.number, None)
        if last is not None:
            self._gone = total([self._gone, last.numbers])
        self._no_longer_waiting(peer, list(self._pending))

    def _no_longer_waiting(self, peer: Peer, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._pending:
                self._pending[number][2].discard(peer.number)
                self._answer_if_complete(number)

    def _answer_if_complete(self, number: int) -> None:
        if not self._pending[number][2]:
            self._answer(number)

    def _answer(self, number: int) -> None:
        found = self._pending.pop(number, None)
        if found is not None:
            asker, scrape, _ = found
            parts = [self._own(), Snapshot(self._gone), *self._last.values()]
            asker.send(Scraped(scrape.number, combined(parts)))
