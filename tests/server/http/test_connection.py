"""Write buffer and client connection, on a scripted transport."""

import asyncio
from typing import Any

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


def test_a_client_that_reads_almost_nothing_is_disconnected() -> None:
    async def main() -> None:
        transport = Transport()
        buffer = WriteBuffer(transport, asyncio.get_running_loop(), 0.01)
        buffer.write_through(b"x" * 10 * MIN_PROGRESS_BYTES)
        transport.unsent = 10 * MIN_PROGRESS_BYTES
        buffer.expect_progress()
        while transport.unsent:
            buffer._check_progress(len(transport.written[0]) - transport.unsent)  # the target was reached
            assert not transport.aborted
            transport.unsent -= MIN_PROGRESS_BYTES
        transport.unsent = 10
        buffer.stop_expecting()
        buffer.close()
        transport.unsent = 9
        async with asyncio.timeout(10):
            while not transport.aborted:
                await asyncio.sleep(0.005)

    asyncio.run(main())


def test_a_closed_connection_that_is_read_to_its_end_is_not_aborted() -> None:
    async def main() -> None:
        transport = Transport()
        buffer = WriteBuffer(transport, asyncio.get_running_loop(), 0.01)
        buffer.write_through(b"x" * 100)
        transport.unsent = 50
        buffer.close()
        transport.unsent = 0
        await asyncio.sleep(0.05)
        assert not transport.aborted

    asyncio.run(main())
