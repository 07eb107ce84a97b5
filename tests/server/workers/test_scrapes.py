"""Metrics of all workers, including those that do not reply or have ended."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from roseinfer.server.observe.exposition import Snapshot
from roseinfer.server.workers import replies as module
from roseinfer.server.workers.messages import (
    CollectedMetrics,
    CollectMetrics,
    FromManager,
    MetricsReply,
    MetricsRequest,
)
from roseinfer.server.workers.scrapes import ScrapeCollector


class Worker:
    def __init__(self, number: int, count: float, scrapes: ScrapeCollector | None) -> None:
        self.number = number
        self.count = count
        self.received: list[FromManager] = []
        self.scrapes = scrapes  # None: it does not reply

    def snapshot(self) -> Snapshot:
        return Snapshot({"c": {("x",): [self.count]}}, breakers=[self.number])

    def send(self, message: FromManager) -> None:
        self.received.append(message)
        if isinstance(message, CollectMetrics) and self.scrapes is not None:
            answer = CollectedMetrics(message.number, self.snapshot())
            asyncio.get_running_loop().call_soon(self.scrapes.on_collected, self, answer)

    def total(self) -> float:
        """Return the count of the last reply."""
        answer = self.received[-1]
        assert isinstance(answer, MetricsReply)
        return answer.all.numbers["c"][("x",)][0]


def play(scene: Callable[[ScrapeCollector], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene(ScrapeCollector(lambda: Snapshot({"own": {(): [1.0]}})))

    asyncio.run(main())


async def ask(scrapes: ScrapeCollector, asker: Worker, *others: Worker) -> float:
    scrapes.start(asker, MetricsRequest(7, asker.snapshot()), others)
    async with asyncio.timeout(10):
        while not (asker.received and isinstance(asker.received[-1], MetricsReply)):
            await asyncio.sleep(0.001)
    total = asker.total()
    asker.received.clear()
    return total


def test_each_worker_gets_the_metrics_of_all() -> None:
    async def scene(scrapes: ScrapeCollector) -> None:
        a, b, c = (Worker(i, 10.0**i, scrapes) for i in (1, 2, 3))
        assert await ask(scrapes, a, b, c) == 1110
        b.count = 500
        assert await ask(scrapes, c, a, b) == 1510
        a.received.clear()
        scrapes.start(a, MetricsRequest(3, a.snapshot()), [])
        [answer] = a.received
        assert isinstance(answer, MetricsReply) and answer.number == 3
        assert answer.all.numbers["own"] == {(): [1.0]}
        assert answer.all.breakers == [1, 2, 3]

    play(scene)


def test_counts_of_ended_workers_remain() -> None:
    async def scene(scrapes: ScrapeCollector) -> None:
        a, b = Worker(1, 10, scrapes), Worker(2, 100, scrapes)
        assert await ask(scrapes, a, b) == 110
        scrapes.on_end(b)
        assert await ask(scrapes, a) == 110
        successor = Worker(3, 5, scrapes)
        assert await ask(scrapes, a, successor) == 115
        assert await ask(scrapes, successor, a) == 115

    play(scene)


def test_a_worker_that_dies_is_not_waited_for() -> None:
    async def scene(scrapes: ScrapeCollector) -> None:
        a, b, hanging = Worker(1, 10, scrapes), Worker(2, 100, scrapes), Worker(3, 1000, None)
        asyncio.get_running_loop().call_later(0.01, scrapes.on_end, hanging)
        assert await ask(scrapes, a, b, hanging) == 110

    play(scene)


def test_a_worker_that_does_not_reply_counts_with_its_last_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKER_TIMEOUT_S", 0.02)

    async def scene(scrapes: ScrapeCollector) -> None:
        a, b = Worker(1, 10, scrapes), Worker(2, 100, scrapes)
        assert await ask(scrapes, a, b) == 110
        b.scrapes = None
        b.count = 200
        assert await ask(scrapes, a, b) == 110
        late = b.received[-1]
        assert isinstance(late, CollectMetrics)
        scrapes.on_collected(b, CollectedMetrics(late.number, b.snapshot()))
        scrapes.on_end(b)
        assert await ask(scrapes, a) == 210, "late replies count, too"

    play(scene)
