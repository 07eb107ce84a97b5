"""Responses of several API processes while the process that runs one has not written its newest state."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roseinfer.server.response_store.records import Key
from roseinfer.server.response_store.shared import SharedResponses
from roseinfer.server.response_store.store import SqliteStore
from tests.server.response_store.test_database import WIDE, record
from tests.server.response_store.test_store import Counted, Held

KEY = Key("", "a")


class Peers:
    """Queries to the other process."""

    def __init__(self) -> None:
        self.others: list[Peers] = []

    def on(self, topic: str, handler: Callable[[bytes], bytes]) -> None:
        self.answer = handler

    async def ask(self, topic: str, body: bytes) -> list[bytes]:
        return [other.answer(body) for other in self.others]


class Two:
    """Two processes. The first one runs a response, and from `hold` on writes nothing until `release`."""

    def __init__(self, file: Path) -> None:
        self.stores = [SqliteStore(file, WIDE, Counted()) for _ in range(2)]
        peers = [Peers(), Peers()]
        peers[0].others, peers[1].others = [peers[1]], [peers[0]]
        self.first, self.second = (SharedResponses(store, each) for store, each in zip(self.stores, peers, strict=True))

    async def run(self) -> None:
        self.running = self.first.begin(record("a", status="in_progress"))
        await self.first.store.written()
        self.held = Held(self.stores[0])

    def close(self) -> None:
        self.held.released.set()
        for store in self.stores:
            store.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path / "db")
    yield made
    made.close()


@pytest.mark.parametrize("canceller", ["first", "second"])
def test_a_cancelled_response_is_cancelled_for_all_before_it_is_written(two: Two, canceller: str) -> None:
    async def scene() -> None:
        await two.run()
        await getattr(two, canceller).cancel(KEY)
        for process in (two.first, two.second):
            found = await process.find(KEY)
            assert found is not None and found.response["status"] == "cancelled"

    asyncio.run(scene())


@pytest.mark.parametrize("ended", [False, True])
def test_a_deleted_response_stays_deleted(two: Two, ended: bool) -> None:
    async def scene() -> None:
        await two.run()
        if ended:
            two.running.cancel()
        assert await two.second.delete(KEY)
        two.held.released.set()
        await two.first.store.written()
        for process in (two.first, two.second):
            assert await process.find(KEY) is None

    asyncio.run(scene())
