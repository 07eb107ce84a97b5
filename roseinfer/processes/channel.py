"""Typed messages over a stream socket, in an event loop."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from roseinfer.processes.frames import FrameReader, frame

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class MessageChannel(asyncio.Protocol, Generic[Sent, Received]):
    """One end of a socket between two of our processes; both sides are trusted.

    `received`: type or union of tagged structs to decode. `on_lost`: called once when the other side has gone.
    """

    def __init__(self, received: Any, on_message: Callable[[Received], None], on_lost: Callable[[], None]) -> None:
        self._decode = msgspec.msgpack.Decoder(received).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._frames = FrameReader()
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        """Take over a connected socket."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._on_message(self._decode(body))

    def send(self, message: Sent) -> None:
        """Send without waiting. A message to a process that has just ended is lost."""
        if self._transport is not None:
            self._transport.write(frame(self._encode(message)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
