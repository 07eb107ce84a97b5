"""Writes that belong together go out as one, in order, and none is lost."""

import asyncio
from typing import Any

from roseinfer.server.http.connection import Cork, Wire


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Flow:
    write_paused = False


class Cycle:
    """As much of uvicorn's request cycle as a wire looks at."""

    def __init__(self) -> None:
        self.flow = Flow()
        self.response_complete = False
        self.more_body = True


def test_what_is_written_in_one_turn_is_one_write() -> None:
    async def main() -> None:
        transport = Transport()
        cork = Cork(transport, asyncio.get_running_loop())
        cork.write(b"head")
        cork.write(b"body")
        assert transport.written == []
        await asyncio.sleep(0)
        assert transport.written == [b"headbody"]
        await asyncio.sleep(0)
        cork.write(b"later")
        cork.write_through(b" at once")
        assert transport.written == [b"headbody", b"later at once"]
        cork.write_through(b"next")
        await asyncio.sleep(0)
        assert transport.written == [b"headbody", b"later at once", b"next"]

    asyncio.run(main())


def test_nothing_is_lost_when_it_closes() -> None:
    async def main() -> None:
        transport = Transport()
        cork = Cork(transport, asyncio.get_running_loop())
        cork.write(b"last words")
        cork.close()
        assert transport.written == [b"last words"] and transport.closed
        cork.write(b"too late")
        await asyncio.sleep(0)
        cork.write_through(b"too late as well")
        assert transport.written == [b"last words"]

    asyncio.run(main())


def test_a_wire_writes_chunks_and_knows_when_its_client_has_left() -> None:
    async def main() -> None:
        transport, cycle, left = Transport(), Cycle(), list[str]()
        made: Any = cycle
        wire = Wire(Cork(transport, asyncio.get_running_loop()), made)
        wire.write(b"x" * 17)
        assert transport.written == [b"11\r\n" + b"x" * 17 + b"\r\n"]
        wire.watch(lambda: left.append("first"))
        wire.watch(None)
        wire.watch(lambda: left.append("second"))
        wire.lost()
        wire.write(b"into the void")
        assert left == ["second"] and len(transport.written) == 1
        wire.watch(lambda: left.append("too late"))
        assert left == ["second", "too late"]

    asyncio.run(main())
