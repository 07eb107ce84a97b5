"""What one worker asks all others, also those that do not answer or are gone."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.workers import questions as module
from roseinfer.server.workers.control import Answer, Answers, Ask, FromManager, FromWorker, Question
from roseinfer.server.workers.questions import OtherWorkers, Questions


class Worker:
    """Both ends of its channel: what it sends reaches the manager, whose messages reach it, in a later turn."""

    def __init__(self, number: int, fleet: "Fleet") -> None:
        self.number = number
        self.peer_queries = OtherWorkers(self._to_manager)
        self._fleet = fleet
        self.deaf = False

    def knows(self, topic: str, what: str) -> "Worker":
        self.peer_queries.on(topic, lambda body: f"{what} {body.decode()}".encode())
        return self

    def send(self, message: FromManager) -> None:
        if not self.deaf:
            asyncio.get_running_loop().call_soon(self._heard, message)

    def _heard(self, message: FromManager) -> None:
        if isinstance(message, Question):
            self.peer_queries.asked(message)
        else:
            assert isinstance(message, Answers)
            self.peer_queries.told(message)

    def _to_manager(self, message: FromWorker) -> None:
        asyncio.get_running_loop().call_soon(self._fleet.received, self, message)

    async def ask(self, topic: str = "a") -> list[str]:
        return sorted(answer.decode() for answer in await self.peer_queries.ask(topic, b"?"))


class Fleet:
    def __init__(self) -> None:
        self.own = PeerQueries()
        self.questions = Questions(self.own)
        self.workers: list[Worker] = []

    def worker(self) -> Worker:
        self.workers.append(Worker(len(self.workers), self))
        return self.workers[-1]

    def received(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Ask):
            self.questions.ask(worker, message, [other for other in self.workers if other is not worker])
        else:
            assert isinstance(message, Answer)
            self.questions.told(worker, message)


def play(scene: Callable[[Fleet], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene(Fleet())

    asyncio.run(main())


def test_who_knows_something_answers_the_manager_too() -> None:
    async def scene(fleet: Fleet) -> None:
        one, two = fleet.worker().knows("a", "one"), fleet.worker().knows("a", "two").knows("b", "more")
        fleet.worker()
        fleet.own.on("a", lambda body: b"manager " + body)
        assert await one.ask() == ["manager ?", "two ?"]
        assert await two.ask() == ["manager ?", "one ?"]
        assert await one.ask("b") == ["more ?"] and await two.ask("b") == []
        assert await asyncio.gather(one.ask("b"), one.ask("a")) == [["more ?"], ["manager ?", "two ?"]]

    play(scene)


def test_alone_there_is_nobody_to_ask() -> None:
    peer_queries = PeerQueries()
    peer_queries.on("a", lambda body: body)
    assert asyncio.run(peer_queries.ask("a", b"?")) == []


def test_an_answer_that_fails_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(fleet: Fleet) -> None:
        one, broken = fleet.worker(), fleet.worker()
        fleet.worker().knows("a", "three")

        def fail(body: bytes) -> bytes:
            raise ValueError("a bug")

        broken.peer_queries.on("a", fail)
        assert await one.ask() == ["three ?"]

    play(scene)
    assert "a question about a could not be answered" in caplog.text


def test_who_dies_while_asked_is_not_waited_for() -> None:
    async def scene(fleet: Fleet) -> None:
        one, _, dying = (fleet.worker().knows("a", name) for name in ("one", "two", "dying"))
        dying.deaf = True
        asyncio.get_running_loop().call_later(0.01, fleet.questions.gone, dying)
        assert await one.ask() == ["two ?"]

    play(scene)


def test_who_is_silent_is_left_out_and_late_words_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)

    async def scene(fleet: Fleet) -> None:
        one, two, silent = (fleet.worker().knows("a", name) for name in ("one", "two", "silent"))
        silent.deaf = True
        assert await one.ask() == ["two ?"]
        fleet.questions.told(silent, Answer(0, b"late"))
        silent.deaf = False
        assert await two.ask() == ["one ?", "silent ?"]

    play(scene)


def test_a_manager_that_is_silent_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANAGER_PATIENCE_S", 0.02)
    sent: list[FromWorker] = []

    async def scene() -> None:
        others = OtherWorkers(sent.append)
        assert await others.ask("a", b"?") == []
        others.told(Answers(0, [b"late"]))

    asyncio.run(scene())
    assert len(sent) == 1
