"""Connections are distributed evenly over workers."""

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from roseinfer.processes.shared_rows import SharedRows
from roseinfer.server.workers import acceptor as module
from roseinfer.server.workers.acceptor import Acceptor
from roseinfer.server.workers.counters import WORKER_ROWS, Count
from roseinfer.server.workers.handover import ConnectionReceiver, ConnectionSender

WORKERS = 4


class FakeWorker:
    """A worker that takes connections and keeps them open."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.end, self.end_of_worker = socket.socketpair()
        self.connections = ConnectionSender(self.end)
        self.worker = ConnectionReceiver(self.end_of_worker)
        self.taken: list[socket.socket] = []

    def receive(self) -> int:
        self.taken += self.worker.receive()[0]
        return len(self.taken)

    def close(self) -> None:
        for end in (self.connections, self.worker, *self.taken):
            end.close()


class Entrance:
    def __init__(self, folder: Path) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = self.listener.getsockname()
        self.counters = SharedRows.create(folder / "counters", WORKER_ROWS, WORKERS)
        self.workers = [FakeWorker(index) for index in range(WORKERS)]
        self.acceptor = Acceptor(self.listener, self.counters)
        self.clients: list[socket.socket] = []

    def connect(self, count: int) -> None:
        self.clients += [socket.create_connection(self.address) for _ in range(count)]

    async def taken(self, count: int) -> list[int]:
        """Return how many connections each worker has, once there are `count` in all."""
        async with asyncio.timeout(10):
            while sum(worker.receive() for worker in self.workers) < count:
                await asyncio.sleep(0.001)
        return [len(worker.taken) for worker in self.workers]

    def close(self) -> None:
        self.acceptor.close()
        for end in (*self.workers, *self.clients):
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
def test_workers_get_equal_numbers_of_connections(tmp_path: Path, count: int) -> None:
    async def scene(entrance: Entrance) -> None:
        for worker in entrance.workers:
            entrance.acceptor.add(worker)
        entrance.connect(count)
        counts = await entrance.taken(count)
        assert max(counts) - min(counts) <= 1, counts

    play(tmp_path, scene)


def test_ended_connections_do_not_count(tmp_path: Path) -> None:
    async def scene(entrance: Entrance) -> None:
        for worker in entrance.workers:
            entrance.acceptor.add(worker)
        entrance.connect(8)
        assert await entrance.taken(8) == [2, 2, 2, 2]
        entrance.counters.add(1, Count.CLOSED, 2)
        entrance.counters.add(3, Count.CLOSED, 1)
        entrance.connect(3)
        assert Counter(await entrance.taken(11)) == Counter({2: 2, 4: 1, 3: 1})
        assert len(entrance.workers[1].taken) == 4

    play(tmp_path, scene)


def test_connections_wait_for_a_worker_and_skip_a_dead_one(tmp_path: Path) -> None:
    async def scene(entrance: Entrance) -> None:
        entrance.connect(2)
        await asyncio.sleep(0.05)
        assert await entrance.taken(0) == [0] * WORKERS
        first, second, third, _ = entrance.workers
        entrance.acceptor.add(first)
        assert (await entrance.taken(2))[0] == 2
        entrance.acceptor.add(second)
        entrance.acceptor.add(third)
        second.worker.close()  # it has died, which the manager has not noticed yet
        entrance.connect(4)
        async with asyncio.timeout(10):
            while first.receive() + third.receive() < 6:
                await asyncio.sleep(0.001)
        entrance.acceptor.remove(second)
        for worker in (first, third):
            entrance.acceptor.remove(worker)
        entrance.connect(1)
        await asyncio.sleep(0.05)
        assert first.receive() + third.receive() == 6
        entrance.acceptor.add(third)
        async with asyncio.timeout(10):
            while first.receive() + third.receive() < 7:
                await asyncio.sleep(0.001)

    play(tmp_path, scene)


def test_connections_wait_for_busy_workers_and_none_is_lost(tmp_path: Path) -> None:
    async def scene(entrance: Entrance) -> None:
        worker = entrance.workers[0]
        worker.end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        entrance.acceptor.add(worker)
        entrance.connect(100)
        await asyncio.sleep(0.05)
        assert (await entrance.taken(100))[0] == 100

    play(tmp_path, scene)


def test_a_late_worker_gets_no_connections(tmp_path: Path) -> None:
    async def scene(entrance: Entrance) -> None:
        first, second, *_ = entrance.workers
        entrance.acceptor.add(first)
        entrance.acceptor.add(second)
        entrance.acceptor.set_late(first, True)
        entrance.connect(6)
        assert (await entrance.taken(6))[:2] == [0, 6]
        entrance.acceptor.set_late(second, True)
        entrance.connect(1)
        await asyncio.sleep(0.05)
        assert first.receive() + second.receive() == 6, "it waits in the kernel"
        entrance.acceptor.set_late(first, False)
        assert (await entrance.taken(7))[:2] == [1, 6]

    play(tmp_path, scene)


def test_a_worker_that_loads_gets_connections_only_while_all_do(tmp_path: Path) -> None:
    async def scene(entrance: Entrance) -> None:
        first, second, *_ = entrance.workers
        entrance.acceptor.add(first, loading=True)
        entrance.acceptor.add(second, loading=True)
        entrance.connect(2)
        assert (await entrance.taken(2))[:2] == [1, 1], "they reply that they are loading"
        entrance.acceptor.set_loaded(second)
        entrance.connect(4)
        assert (await entrance.taken(6))[:2] == [1, 5]
        entrance.acceptor.set_loaded(first)
        entrance.connect(2)
        assert (await entrance.taken(8))[:2] == [3, 5]
        entrance.acceptor.remove(second)
        entrance.acceptor.add(second, loading=True)
        entrance.connect(3)
        assert (await entrance.taken(11))[:2] == [6, 5], "the second one is loading again"

    play(tmp_path, scene)


def test_connections_that_a_dead_worker_never_took_go_to_another(tmp_path: Path) -> None:
    async def scene(entrance: Entrance) -> None:
        first, second, *_ = entrance.workers
        entrance.acceptor.add(first)
        entrance.connect(5)
        await asyncio.sleep(0.05)
        first.worker.close()
        entrance.acceptor.remove(first)
        first.connections.close()
        entrance.acceptor.add(second)
        async with asyncio.timeout(10):
            while second.receive() < 5:
                await asyncio.sleep(0.001)
        for client, connection in zip(entrance.clients, second.taken, strict=True):
            connection.sendall(b"x")
            assert client.recv(1) == b"x"

    play(tmp_path, scene)


def test_a_worker_without_descriptors_gets_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FULL_PAUSE_S", 1000.0)

    async def scene(entrance: Entrance) -> None:
        loop = asyncio.get_running_loop()
        first, second, *_ = entrance.workers
        entrance.acceptor.add(first)
        entrance.connect(1)
        await asyncio.sleep(0.05)
        _, descriptors, _, _ = socket.recv_fds(first.end_of_worker, 1, 1)
        os.close(descriptors[0])
        first.end_of_worker.send(b"n")  # the reply of a worker without a descriptor
        await asyncio.sleep(0.05)
        assert first.receive() == 0
        entrance.acceptor.add(second)
        async with asyncio.timeout(10):
            while second.receive() < 1:
                await asyncio.sleep(0.001)
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + module.FULL_PAUSE_S)
        async with asyncio.timeout(10):
            while not first.taken:
                entrance.connect(1)
                await asyncio.sleep(0.01)
                first.receive()
                second.receive()

    play(tmp_path, scene)
    assert [record.message for record in caplog.records] == ["API worker 0 has no descriptor left for new connections"]
