"""The metrics of all workers, also of those that do not answer or are gone."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from roseinfer.server.observe.exposition import Snapshot
from roseinfer.server.workers import scrapes as module
from roseinfer.server.workers.control import Collect, Collected, FromManager, Scrape, Scraped
from roseinfer.server.workers.scrapes import Scrapes


class Worker:
    def __init__(self, number: int, count: float, scrapes: Scrapes | None) -> None:
        self.number = number
        self.count = count
        self.heard: list[FromManager] = []
        self._scrapes = scrapes  # None: it does not answer

    def snapshot(self) -> Snapshot:
        return Snapshot({"c": {("x",): [self.count]}}, breakers=[self.number])

    def send(self, message: FromManager) -> None:
        self.heard.append(message)
        if isinstance(message, Collect) and self._scrapes is not None:
            answer = Collected(message.number, self.snapshot())
            asyncio.get_running_loop().call_soon(self._scrapes.told, self, answer)

    def total(self) -> float:
        """Of the last answer."""
        answer = self.heard[-1]
        assert isinstance(answer, Scraped)
        return answer.all.numbers["c"][("x",)][0]


def play(scene: Callable[[Scrapes], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene(Scrapes(lambda: Snapshot({"own": {(): [1.0]}})))

    asyncio.run(main())


async def ask(scrapes: Scrapes, asker: Worker, *others: Worker) -> float:
    scrapes.ask(asker, Scrape(7, asker.snapshot()), others)
    async with asyncio.timeout(10):
        while not (asker.heard and isinstance(asker.heard[-1], Scraped)):
            await asyncio.sleep(0.001)
    total = asker.total()
    asker.heard.clear()
    return total


def test_whoever_is_asked_knows_it_all() -> None:
    async def scene(scrapes: Scrapes) -> None:
        a, b, c = (Worker(i, 10.0**i, scrapes) for i in (1, 2, 3))
        assert await ask(scrapes, a, b, c) == 1110
        b.count = 500
        assert await ask(scrapes, c, a, b) == 1510
        a.heard.clear()
        scrapes.ask(a, Scrape(3, a.snapshot()), [])
        [answer] = a.heard
        assert isinstance(answer, Scraped) and answer.number == 3
        assert answer.all.numbers["own"] == {(): [1.0]}
        assert answer.all.breakers == [1, 2, 3]

    play(scene)


def test_counts_of_the_dead_stay() -> None:
    async def scene(scrapes: Scrapes) -> None:
        a, b = Worker(1, 10, scrapes), Worker(2, 100, scrapes)
        assert await ask(scrapes, a, b) == 110
        scrapes.gone(b)
        assert await ask(scrapes, a) == 110
        successor = Worker(3, 5, scrapes)
        assert await ask(scrapes, a, successor) == 115
        assert await ask(scrapes, successor, a) == 115

    play(scene)


def test_who_dies_while_asked_is_not_waited_for() -> None:
    async def scene(scrapes: Scrapes) -> None:
        a, b, silent = Worker(1, 10, scrapes), Worker(2, 100, scrapes), Worker(3, 1000, None)
        asyncio.get_running_loop().call_later(0.01, scrapes.gone, silent)
        assert await ask(scrapes, a, b, silent) == 110

    play(scene)


def test_who_does_not_answer_counts_with_what_it_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)

    async def scene(scrapes: Scrapes) -> None:
        a, b = Worker(1, 10, scrapes), Worker(2, 100, scrapes)
        assert await ask(scrapes, a, b) == 110
        b._scrapes = None
        b.count = 200
        assert await ask(scrapes, a, b) == 110
        late = b.heard[-1]
        assert isinstance(late, Collect)
        scrapes.told(b, Collected(late.number, b.snapshot()))
        scrapes.gone(b)
        assert await ask(scrapes, a) == 210, "late words count too"

    play(scene)
