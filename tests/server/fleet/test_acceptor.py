"""Connections are dealt out evenly, whatever their number."""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from roseinfer.server.fleet.acceptor import Acceptor
from roseinfer.server.fleet.control import handed_over
from roseinfer.server.fleet.counters import Count, SharedCounters, counters_file

WORKERS = 4


class FakeHost:
    """A worker that takes connections and keeps them open."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.connections, self._end = socket.socketpair()
        self.connections.setblocking(False)
        self._end.setblocking(False)
        self.taken: list[socket.socket] = []

    def look(self) -> int:
        self.taken += handed_over(self._end)
        return len(self.taken)

    def close(self) -> None:
        for end in (self.connections, self._end, *self.taken):
            end.close()


class Entrance:
    def __init__(self, folder: Path) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = self.listener.getsockname()
        self.counters = SharedCounters(counters_file(str(folder / "counters"), WORKERS), WORKERS)
        self.hosts = [FakeHost(index) for index in range(WORKERS)]
        self.acceptor = Acceptor(self.listener, self.counters)
        self._clients: list[socket.socket] = []

    def connect(self, count: int) -> None:
        self._clients += [socket.create_connection(self.address) for _ in range(count)]

    async def taken(self, count: int) -> list[int]:
        """How many connections each worker has, once there are so many in all."""
        async with asyncio.timeout(10):
            while sum(host.look() for host in self.hosts) < count:
                await asyncio.sleep(0.001)
        return [len(host.taken) for host in self.hosts]

    def close(self) -> None:
        self.acceptor.close()
        for end in (*self.hosts, *self._clients):
            end.close()


def play(folder: Path, scene: Callable[[Entrance], object]) -> None:
    async def main() -> None:
        entrance = Entrance(folder)
        try:
            await scene(entrance)  # type: ignore[misc]
        finally:
            entrance.close()

    asyncio.run(main())


@pytest.mark.parametrize("count", [3, 8, 42, 200])
def test_each_worker_gets_as_many_as_the_next(tmp_path: Path, count: int) -> None:
    async def scene(entrance: Entrance) -> None:
        for host in entrance.hosts:
            entrance.acceptor.add(host)
        entrance.connect(count)
        counts = await entrance.taken(count)
        assert max(counts) - min(counts) <= 1, counts

    play(tmp_path, scene)


def test_connections_that_have_ended_count_no_more(tmp_path: Path) -> None:
    async def scene(entrance: Entrance) -> None:
        for host in entrance.hosts:
            entrance.acceptor.add(host)
        entrance.connect(8)
        assert await entrance.taken(8) == [2, 2, 2, 2]
        entrance.counters.add(1, Count.CLOSED, 2)
        entrance.counters.add(3, Count.CLOSED, 1)
        entrance.connect(3)
        assert Counter(await entrance.taken(11)) == Counter({2: 2, 4: 1, 3: 1})
        assert len(entrance.hosts[1].taken) == 4

    play(tmp_path, scene)


def test_connections_wait_for_a_worker_and_pass_by_one_that_is_gone(tmp_path: Path) -> None:
    async def scene(entrance: Entrance) -> None:
        entrance.connect(2)
        await asyncio.sleep(0.05)
        assert await entrance.taken(0) == [0] * WORKERS
        first, second, third, _ = entrance.hosts
        entrance.acceptor.add(first)
        assert (await entrance.taken(2))[0] == 2
        entrance.acceptor.add(second)
        entrance.acceptor.add(third)
        second._end.close()  # it has died, and nobody has noticed yet
        entrance.connect(4)
        async with asyncio.timeout(10):
            while first.look() + third.look() < 6:
                await asyncio.sleep(0.001)
        entrance.acceptor.remove(second)
        for host in (first, third):
            entrance.acceptor.remove(host)
        entrance.connect(1)
        await asyncio.sleep(0.05)
        assert first.look() + third.look() == 6
        entrance.acceptor.add(third)
        async with asyncio.timeout(10):
            while first.look() + third.look() < 7:
                await asyncio.sleep(0.001)

    play(tmp_path, scene)


def test_when_no_worker_takes_more_they_wait_and_none_is_lost(tmp_path: Path) -> None:
    async def scene(entrance: Entrance) -> None:
        host = entrance.hosts[0]
        host.connections.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        entrance.acceptor.add(host)
        entrance.connect(100)
        await asyncio.sleep(0.05)
        assert (await entrance.taken(100))[0] == 100

    play(tmp_path, scene)
