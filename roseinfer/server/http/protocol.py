"""uvicorn's connection with limits that only the HTTP parser can hold, and with a `Wire` for each request."""

import asyncio
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.limits import Limits
from roseinfer.server.http.wire import EXTENSION, Cork, Wire


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
