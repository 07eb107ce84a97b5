"""A network between a client and an engine's port that a test cuts, resets and slows down."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from roseinfer.cluster.remote.address import HostPort

_PIECE_BYTES = 2**16


class Wire:
    """Forwards connections to `target` from a port of its own on loopback.

    Cut, it takes no byte and returns none, and says so to nobody: connections stay as they are, and new ones get no
    answer. What the ends had sent meanwhile arrives once it is mended, as from a network that was down for a while.
    """

    def __init__(self, target: HostPort) -> None:
        self.connections = 0  # ever
        self._target = target
        self._there, self._back = asyncio.Event(), asyncio.Event()
        self.mend()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = target._replace(port=0)

    def cut(self, *, there: bool = True, back: bool = True) -> None:
        """In both directions, or in one of them: to the engine, or from there."""
        for flows, stops in ((self._there, there), (self._back, back)):
            if stops:
                flows.clear()

    def mend(self) -> None:
        self._there.set()
        self._back.set()

    def reset(self) -> None:
        """All connections end at once, as those of a host do that has lost its memory of them."""
        for writer in self._writers:
            writer.transport.abort()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._take, self._target.host, self.address.port)
        self.address = HostPort(*self._server.sockets[0].getsockname()[:2])

    async def close(self) -> None:
        """Nothing listens any more. `open` has it listen there again."""
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._there.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._writers.add(far_writer)
            pumps = (_pump(reader, far_writer, self._there), _pump(far_reader, writer, self._back))
            try:
                await asyncio.gather(*pumps)
            finally:
                self._writers.discard(far_writer)
                far_writer.close()
        except (OSError, asyncio.CancelledError):  # the latter only at the end of the test
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
    """Copy one direction. Raise `ConnectionError` at its end, so that the other direction ends as well."""
    while data := await reader.read(_PIECE_BYTES):
        await flows.wait()
        writer.write(data)
        await writer.drain()
    await flows.wait()
    raise ConnectionResetError("it has ended")


@contextlib.asynccontextmanager
async def wire(target: HostPort) -> AsyncIterator[Wire]:
    made = Wire(target)
    await made.open()
    try:
        yield made
    finally:
        await made.close()
