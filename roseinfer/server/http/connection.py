"""Connections: uvicorn's class with limits, writes that belong together as one, and each request's own view of it."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.limits import Limits

# Where a request's scope has its `Wire`.
EXTENSION = "roseinfer.wire"


class Cork(asyncio.Transport):
    """Collects what is written in one turn of the event loop, so that a head and its body are one packet and one call.

    uvloop writes at once whatever it is given, and a write costs more than everything else that a token costs here.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(bytes(data))

    def write_through(self, data: bytes) -> None:
        """Now, behind what is held."""
        if self._held:
            self._held.append(data)
            self.flush()
        elif not self._transport.is_closing():
            self._transport.write(data)

    def flush(self) -> None:
        if self._held:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            if not self._transport.is_closing():
                self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class Wire:
    """One request's connection."""

    __slots__ = ("_cork", "_cycle", "_gone", "_on_gone")

    def __init__(self, cork: Cork, cycle: RequestResponseCycle) -> None:
        self._cork = cork
        self._cycle = cycle
        self._gone = False
        self._on_gone: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self._cycle.response_complete

    @property
    def arrived(self) -> bool:
        """Whether all of the request's body is here."""
        return not self._cycle.more_body

    @property
    def paused(self) -> bool:
        """Whether the client takes less than it was sent: what is written now would pile up."""
        return self._cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """A piece of a body whose head was sent without a length, at once."""
        if not self._gone:
            self._cork.write_through(b"%x\r\n%b\r\n" % (len(data), data))

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Have `on_gone` called when the client leaves (at once if it has); None: not any more."""
        self._on_gone = on_gone
        if self._gone and on_gone is not None:
            on_gone()

    def lost(self) -> None:
        """The connection is closed."""
        self._gone = True
        if self._on_gone is not None:
            self._on_gone()


# --- uvicorn's connection ------------------------------------------------------------------------------------------
class TooManyHeaders(Exception):
    """Ends the parsing; the client gets a 400."""


def limited_protocol(limits: Limits, on_closed: Callable[[], None] | None = None) -> type[HttpToolsProtocol]:
    """A connection class for uvicorn that refuses requests whose head breaks `limits`: number and size of headers,
    and how long they may take. `on_closed` is called when a connection has ended.
    """

    class LimitedProtocol(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0
        _wires: tuple[Wire, ...] = ()  # several if the client sends requests before it has its answers

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(Cork(cast(asyncio.Transport, transport), self.loop))
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_arrived()
            super().connection_lost(exc)
            for wire in self._wires:
                wire.lost()
            if on_closed is not None:
                on_closed()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head_timer is None or self.transport.is_closing():
                return
            # The parser keeps an unfinished header to itself, so what counts is what it was fed.
            self._head_bytes += len(data)
            if self._head_bytes > limits.max_header_bytes:
                self.send_400_response("The request's head is too large.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._head_timer is None:
                self._expect_head()

        def on_headers_complete(self) -> None:
            self._head_arrived()
            if len(self.headers) > limits.max_header_count:
                raise TooManyHeaders
            super().on_headers_complete()
            wire = Wire(cast(Cork, self.transport), self.cycle)
            self._wires = (*(other for other in self._wires if not other.done), wire)
            self.scope["extensions"] = {EXTENSION: wire}  # type: ignore[dict-item]

        def send_400_response(self, msg: str) -> None:
            body = bad_request(msg).body()
            head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
            self.transport.close()

        def _expect_head(self) -> None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(limits.header_timeout_s, self.transport.close)

        def _head_arrived(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return LimitedProtocol
