"""Write buffer and client connection, on a scripted transport."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from roseinfer.server.http.connection import ClientConnection
from roseinfer.server.http.write_buffer import MIN_PROGRESS_BYTES, WriteBuffer


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = self.aborted = False
        self.unsent = 0

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closed


class Flow:
    write_paused = False


class Cycle:
    """Parts of uvicorn's request cycle that `ClientConnection` reads."""

    def __init__(self) -> None:
        self.flow = Flow()
        self.response_complete = False
        self.more_body = True
        self.chunked_encoding = True


def test_writes_of_one_turn_are_joined() -> None:
    async def main() -> None:
        transport = Transport()
        buffer = WriteBuffer(transport, asyncio.get_running_loop(), 30.0)
        buffer.write(b"head")
        buffer.write(b"body")
        assert transport.written == []
        await asyncio.sleep(0)
        assert transport.written == [b"headbody"]
        await asyncio.sleep(0)
        buffer.write(b"later")
        buffer.write_through(b" at once")
        assert transport.written == [b"headbody", b"later at once"]
        buffer.write_through(b"next")
        await asyncio.sleep(0)
        assert transport.written == [b"headbody", b"later at once", b"next"]

    asyncio.run(main())


def test_pending_data_is_written_on_close() -> None:
    async def main() -> None:
        transport = Transport()
        buffer = WriteBuffer(transport, asyncio.get_running_loop(), 30.0)
        buffer.write(b"last words")
        buffer.close()
        assert transport.written == [b"last words"] and transport.closed
        buffer.write(b"too late")
        await asyncio.sleep(0)
        buffer.write_through(b"too late as well")
        assert transport.written == [b"last words"]

    asyncio.run(main())


def test_a_client_connection_writes_chunks_and_reports_a_disconnect() -> None:
    async def main() -> None:
        transport, cycle, left = Transport(), Cycle(), list[str]()
        made: Any = cycle
        connection = ClientConnection(WriteBuffer(transport, asyncio.get_running_loop(), 30.0), made)
        connection.write(b"x" * 17)
        assert transport.written == [b"11\r\n" + b"x" * 17 + b"\r\n"]
        connection.on_disconnect(lambda: left.append("first"))
        connection.on_disconnect(None)
        connection.on_disconnect(lambda: left.append("second"))
        connection.mark_lost()
        connection.write(b"into the void")
        assert left == ["second"] and len(transport.written) == 1
        connection.on_disconnect(lambda: left.append("too late"))
        assert left == ["second", "too late"]

    asyncio.run(main())


class Timers:
    """Timers of an event loop. They fire when the test says so."""

    def __init__(self) -> None:
        self.started: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, callback: Callable[[int], None], target: int) -> "Timers":
        self.started.append(partial(callback, target))
        return self

    def cancel(self) -> None:
        self.started.clear()

    def fire(self) -> None:
        self.started.pop()()


def unread(unsent: int) -> tuple[Transport, Timers, WriteBuffer]:
    """Return a buffer whose client has not read the last `unsent` bytes."""
    transport, timers = Transport(), Timers()
    loop: Any = timers
    buffer = WriteBuffer(transport, loop, 30.0)
    buffer.write_through(b"x" * unsent)
    transport.unsent = unsent
    return transport, timers, buffer


def test_a_client_that_reads_keeps_its_connection() -> None:
    transport, timers, buffer = unread(10 * MIN_PROGRESS_BYTES)
    buffer.expect_progress()
    while transport.unsent:
        transport.unsent -= MIN_PROGRESS_BYTES
        timers.fire()
        assert not transport.aborted
    assert timers.started == []


@pytest.mark.parametrize(("unsent", "read"), [(10 * MIN_PROGRESS_BYTES, MIN_PROGRESS_BYTES - 1), (10, 9)])
def test_a_client_that_reads_almost_nothing_is_disconnected(unsent: int, read: int) -> None:
    transport, timers, buffer = unread(unsent)
    buffer.expect_progress()
    transport.unsent -= read
    timers.fire()
    assert transport.aborted


def test_a_client_that_has_read_most_is_not_expected_to_read_on() -> None:
    _, timers, buffer = unread(10)
    buffer.expect_progress()
    buffer.stop_expecting()
    assert timers.started == []


@pytest.mark.parametrize("reads", [True, False])
def test_a_closed_connection_is_aborted_unless_it_is_read_to_its_end(reads: bool) -> None:
    transport, timers, buffer = unread(100)
    buffer.close()
    transport.unsent = 0 if reads else 99
    timers.fire()
    assert transport.aborted is not reads
