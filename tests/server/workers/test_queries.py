"""Queries of a worker to all others, including those that do not answer or have ended."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.workers import replies as module
from roseinfer.server.workers.messages import (
    ForwardedQuery,
    FromManager,
    FromWorker,
    PeerAnswers,
    PeerQuery,
    QueryAnswer,
)
from roseinfer.server.workers.queries import QueryForwarder, WorkerPeerQueries


class Worker:
    """A worker and its channel, which delivers messages in a later turn of the event loop."""

    def __init__(self, number: int, server: "Server") -> None:
        self.number = number
        self.peer_queries = WorkerPeerQueries(self._to_manager)
        self._server = server
        self.hangs = False

    def knows(self, topic: str, what: str) -> "Worker":
        self.peer_queries.on(topic, lambda body: f"{what} {body.decode()}".encode())
        return self

    def send(self, message: FromManager) -> None:
        if not self.hangs:
            asyncio.get_running_loop().call_soon(self._receive, message)

    def _receive(self, message: FromManager) -> None:
        if isinstance(message, ForwardedQuery):
            self.peer_queries.on_query(message)
        else:
            assert isinstance(message, PeerAnswers)
            self.peer_queries.on_answers(message)

    def _to_manager(self, message: FromWorker) -> None:
        asyncio.get_running_loop().call_soon(self._server.receive, self, message)

    async def ask(self, topic: str = "a") -> list[str]:
        return sorted(answer.decode() for answer in await self.peer_queries.ask(topic, b"?"))


class Server:
    def __init__(self) -> None:
        self.own = PeerQueries()
        self.queries = QueryForwarder(self.own)
        self.workers: list[Worker] = []

    def worker(self) -> Worker:
        self.workers.append(Worker(len(self.workers), self))
        return self.workers[-1]

    def receive(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, PeerQuery):
            self.queries.start(worker, message, [other for other in self.workers if other is not worker])
        else:
            assert isinstance(message, QueryAnswer)
            self.queries.on_answer(worker, message)


def play(scene: Callable[[Server], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene(Server())

    asyncio.run(main())


def test_workers_and_manager_that_know_something_answer() -> None:
    async def scene(server: Server) -> None:
        one, two = server.worker().knows("a", "one"), server.worker().knows("a", "two").knows("b", "more")
        server.worker()
        server.own.on("a", lambda body: b"manager " + body)
        assert await one.ask() == ["manager ?", "two ?"]
        assert await two.ask() == ["manager ?", "one ?"]
        assert await one.ask("b") == ["more ?"] and await two.ask("b") == []
        assert await asyncio.gather(one.ask("b"), one.ask("a")) == [["more ?"], ["manager ?", "two ?"]]

    play(scene)


def test_a_single_process_gets_no_answers() -> None:
    peer_queries = PeerQueries()
    peer_queries.on("a", lambda body: body)
    assert asyncio.run(peer_queries.ask("a", b"?")) == []


def test_a_handler_that_fails_gives_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(server: Server) -> None:
        one, broken = server.worker(), server.worker()
        server.worker().knows("a", "three")

        def fail(body: bytes) -> bytes:
            raise ValueError("a bug")

        broken.peer_queries.on("a", fail)
        assert await one.ask() == ["three ?"]

    play(scene)
    assert "cannot answer a query about a" in caplog.text


def test_a_worker_that_dies_is_not_waited_for() -> None:
    async def scene(server: Server) -> None:
        one, _, dying = (server.worker().knows("a", name) for name in ("one", "two", "dying"))
        dying.hangs = True
        asyncio.get_running_loop().call_later(0.01, server.queries.on_end, dying)
        assert await one.ask() == ["two ?"]

    play(scene)


def test_a_worker_that_hangs_is_left_out_and_its_late_answer_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKER_TIMEOUT_S", 0.02)

    async def scene(server: Server) -> None:
        one, two, hanging = (server.worker().knows("a", name) for name in ("one", "two", "hanging"))
        hanging.hangs = True
        assert await one.ask() == ["two ?"]
        server.queries.on_answer(hanging, QueryAnswer(0, b"late"))
        hanging.hangs = False
        assert await two.ask() == ["hanging ?", "one ?"]

    play(scene)


def test_a_worker_does_not_wait_for_a_hung_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANAGER_TIMEOUT_S", 0.02)
    sent: list[FromWorker] = []

    async def scene() -> None:
        queries = WorkerPeerQueries(sent.append)
        assert await queries.ask("a", b"?") == []
        queries.on_answers(PeerAnswers(0, [b"late"]))

    asyncio.run(scene())
    assert len(sent) == 1
