"""Transports between a client and its engine, and the connection to an engine in another process."""

import asyncio
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import msgspec

from roseinfer.core import errors
from roseinfer.core.errors import EngineDeadError
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.messages import ClientMessage, EngineMessage, Ready, StartFailed
from roseinfer.processes.frames import FrameError, Frames, PlainFrames

OnMessage = Callable[[EngineMessage], None]
OnDeath = Callable[[str], None]


class Transport(Protocol):
    """Carrier of messages to an engine and back. `start` is called first, `close` last."""

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        """Start the engine or connect to it. Both callbacks run in this event loop, `on_death` at most once.

        Raise the typed error that kept the engine from starting.
        """
        ...

    def send(self, message: ClientMessage) -> None:
        """Send without waiting. A message to an engine that has just died is lost; `on_death` follows."""
        ...

    async def close(self) -> None:
        """Disconnect. The owner of an engine stops it and waits until its processes have ended."""
        ...


class EngineConnection(asyncio.Protocol):
    """Connection to an engine in another process. `ready`: its description or start error. `lost`: set when the
    connection ends. `up`: True if the engine has started.

    `frames`: framing of messages. `max_unsent_bytes`: bytes that may wait to be sent before the connection is aborted.
    """

    def __init__(
        self, on_message: OnMessage, on_death: OnDeath, frames: Frames | None = None, max_unsent_bytes: float = math.inf
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineInfo] = loop.create_future()
        self.lost = asyncio.Event()
        self.up = False
        self._on_message = on_message
        self._on_death = on_death
        self._frames = frames or PlainFrames()
        self._max_unsent_bytes = max_unsent_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineMessage).decode
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        try:
            messages = list(map(self._decode, self._frames.feed(data)))
        except (FrameError, msgspec.MsgspecError) as error:
            self.fail(f"the engine sent an invalid message: {error}")
            self.close()
            return
        for message in messages:
            self._take(message)

    def _take(self, message: EngineMessage) -> None:
        if isinstance(message, Ready):
            self.up = True
            self._settle(message.info)
        elif isinstance(message, StartFailed):
            self._settle(_start_error(message))
        else:
            self._on_message(message)

    def fail(self, reason: str) -> None:
        self._settle(EngineDeadError(reason))
        self._on_death(reason)

    def _settle(self, outcome: EngineInfo | Exception) -> None:
        settle(self.ready, outcome)

    def send(self, message: ClientMessage) -> None:
        data = self._encode(message)
        if self._transport is None:
            return
        self._transport.write(self._frames.wrap(data))
        if self._transport.get_write_buffer_size() > self._max_unsent_bytes:
            self._transport.abort()  # which is reported later: the caller is in the middle of other work

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class ConnectionTransport:
    """Transport to an engine that another process owns. Subclasses define `open`."""

    def __init__(self) -> None:
        self._link: EngineConnection | None = None
        self._watch: asyncio.Task[None] | None = None

    async def open(self, on_message: OnMessage, on_death: OnDeath) -> EngineConnection:
        """Connect. Raise `OSError` if the engine cannot be reached."""
        raise NotImplementedError

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        try:
            self._link = await self.open(on_message, on_death)
        except OSError as error:
            raise EngineDeadError(f"cannot reach the engine: {error}") from error
        self._watch = asyncio.create_task(self._await_end(self._link))
        return await self._link.ready

    async def _await_end(self, link: EngineConnection) -> None:
        await link.lost.wait()
        link.fail("the connection to the engine was lost")

    def send(self, message: ClientMessage) -> None:
        assert self._link is not None, "start comes first"
        self._link.send(message)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._link is not None:
            self._link.ready.cancel()
            self._link.close()


class UnixSocketTransport(ConnectionTransport):
    """Transport to an engine on this machine. `address`: path of its socket."""

    def __init__(self, address: Path) -> None:
        super().__init__()
        self._address = address

    async def open(self, on_message: OnMessage, on_death: OnDeath) -> EngineConnection:
        return await connect(self._address, on_message, on_death)


async def connect(address: Path, on_message: OnMessage, on_death: OnDeath) -> EngineConnection:
    """Connect to the socket of an engine on this machine. Raise `OSError` if it cannot be reached."""
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(lambda: EngineConnection(on_message, on_death), os.fspath(address))
    return link


def _start_error(message: StartFailed) -> Exception:
    kind = getattr(errors, message.error, None) if message.error else None
    if isinstance(kind, type) and issubclass(kind, errors.RoseinferError):
        return kind(message.message)
    return EngineDeadError(f"the engine failed to start: {message.message}")


def settle(ready: "asyncio.Future[EngineInfo]", outcome: EngineInfo | Exception) -> None:
    """Set the result of a start, unless it is set or cancelled."""
    if ready.done():
        return
    if isinstance(outcome, Exception):
        ready.set_exception(outcome)
    else:
        ready.set_result(outcome)
