"""Connections: uvicorn's class with limits, writes that belong together as one, and each request's own view of it."""

import asyncio
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from roseinfer.server.http.errors import ApiError, bad_request, head_too_large
from roseinfer.server.http.limits import Limits

log = logging.getLogger(__name__)

# Where a request's scope has its `Wire`.
EXTENSION = "roseinfer.wire"
# Of what a client has not taken, so much must go within the write timeout: less than any line carries.
MIN_PROGRESS_BYTES = 2**16
# After a client has closed its side: when to see whether it still reads. The last interval repeats.
PROBES_S = (0.1, 0.5, 15.0)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class WriteBuffer(asyncio.Transport):
    """Collects what is written in one turn of the event loop, so that a head and its body are one packet and one call.

    uvloop writes at once whatever it is given, and a write costs more than everything else that a token costs here.

    From `expect_progress` or `close` on, a client that takes next to nothing of what is left for `timeout_s` seconds
    loses its connection: the rest of its answer would stay in memory for ever.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._timeout_s = timeout_s
        self._held: list[bytes] = []
        self._given = 0  # bytes, ever, to the transport
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(bytes(data))

    def write_through(self, data: bytes) -> None:
        """Now, behind what is held."""
        if self._held:
            self._held.append(data)
            self.flush()
        else:
            self._give(data)

    def flush(self) -> None:
        if self._held:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            self._give(data)

    def _give(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._given += len(data)
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self.expect_progress()

    def abort(self) -> None:
        self._transport.abort()

    # --- the write timeout --------------------------------------------------------------------------------------
    def expect_progress(self) -> None:
        """To be called when the client does not take what it is sent."""
        if self._timer is None:
            unsent = self._transport.get_write_buffer_size()
            due = self._given - unsent + min(unsent, MIN_PROGRESS_BYTES)
            self._timer = self._loop.call_later(self._timeout_s, self._check_progress, due)

    def stop_expecting(self) -> None:
        """To be called when it has taken most of it, or the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self, due: int) -> None:
        """`due`: how many bytes, of all there ever were, should have gone by now."""
        self._timer = None
        unsent = self._transport.get_write_buffer_size()
        if self._given - unsent < due:
            log.info("a client has taken next to nothing for %g s: its connection is cut", self._timeout_s)
            self.abort()
        elif unsent:
            self.expect_progress()

    # --- what is passed on --------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class Wire:
    """One request's connection. `filler`: what may be written between two writes of its answer and means nothing, once
    the answer has begun; empty if there is no such thing.
    """

    __slots__ = ("_buffer", "_cycle", "_gone", "_on_gone", "filler")

    def __init__(self, buffer: WriteBuffer, cycle: RequestResponseCycle) -> None:
        self._buffer = buffer
        self._cycle = cycle
        self._gone = False
        self._on_gone: Callable[[], None] | None = None
        self.filler = b""

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
            self._buffer.write_through(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """End the connection without what is still to be sent."""
        self._buffer.abort()

    def probe(self) -> None:
        """Say something that means nothing. A client that has left, and not only closed its side, makes the connection
        end by it: an answer to what it says nobody there takes.
        """
        if not self._cycle.response_started:
            self._buffer.write(INTERIM)
        elif self.filler and not self.paused:
            self.write(self.filler)

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
# The event loops read at most so much of a connection at a time.
MAX_READ_BYTES = 2**18


_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class HeadRefused(Exception):
    """Ends the parsing of a connection."""


def limited_protocol(limits: Limits, on_closed: Callable[[], None] | None = None) -> type[HttpToolsProtocol]:
    """A connection class for uvicorn that holds `limits`: number and size of headers, how long they may take, and how
    long a client may take nothing of its answer. `on_closed` is called when a connection has ended.

    A client may close its side behind a request and still gets the answer. A request to change the protocol is answered
    as if it had not asked.
    """

    class LimitedProtocol(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0  # of a head that is not complete, and what came before it in the same read
        _read_bytes = 0  # of the read that is being parsed
        _refusal: ApiError | None = None
        _wires: tuple[Wire, ...] = ()  # several if the client sends requests before it has its answers
        _buffer: WriteBuffer
        _half_closed = False
        _probe_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._buffer = WriteBuffer(cast(asyncio.Transport, transport), self.loop, limits.write_timeout_s)
            super().connection_made(self._buffer)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_arrived()
            self._expect_nothing()
            self._buffer.stop_expecting()
            if self._probe_timer is not None:
                self._probe_timer.cancel()
            super().connection_lost(exc)
            for wire in self._wires:
                wire.lost()
            if on_closed is not None:
                on_closed()

        def data_received(self, data: bytes) -> None:
            self._read_bytes = len(data)
            try:
                # Looked for in heads only: what else a client may send can be long.
                asks = self._head_timer is not None and b"pgrade" in data
                self.parser.feed_data(_without_upgrade(data) if asks else data)
            except HttpParserUpgrade:
                pass
            except HttpParserError:
                self._send_refusal(self._refusal or bad_request("Invalid HTTP request received."))
                return
            if self._head_timer is None or self.transport.is_closing():
                return
            # The parser keeps an unfinished header to itself, so what counts is what it was fed.
            self._head_bytes += len(data)
            if self._head_bytes > limits.max_header_bytes + MAX_READ_BYTES:
                self._send_refusal(_head_too_large(limits))

        def on_message_begin(self) -> None:
            self._expect_nothing()
            super().on_message_begin()
            if self._head_timer is None:
                self._expect_head()

        def on_headers_complete(self) -> None:
            self._head_arrived()
            self._expect_nothing()
            self._refusal = self._check_head()
            if self._refusal is not None:
                raise HeadRefused
            super().on_headers_complete()
            wire = Wire(self._buffer, self.cycle)
            self._wires = (*(other for other in self._wires if not other.done), wire)
            self.scope["extensions"] = {EXTENSION: wire}  # type: ignore[dict-item]

        def _check_head(self) -> ApiError | None:
            headers = self.headers
            if len(headers) > limits.max_header_count:
                return head_too_large(f"The request has more than {limits.max_header_count} headers")
            # With parts of other requests, so the head may be small all the same.
            if self._head_bytes + self._read_bytes > limits.max_header_bytes and self._size() > limits.max_header_bytes:
                return _head_too_large(limits)
            hosts = 0
            for name, value in headers:
                if name == b"host":
                    hosts += 1
                elif name == b"transfer-encoding" and value.lower() != b"chunked":
                    shown = value[:100].decode("latin-1")
                    return bad_request(f"Transfer-Encoding {shown!r} is not supported, only 'chunked'")
            if hosts != 1 and (hosts or self.parser.get_http_version() != "1.0"):
                return bad_request("A request must have one Host header")
            return None

        def _size(self) -> int:
            return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._buffer.expect_progress()

        def resume_writing(self) -> None:
            super().resume_writing()
            if not self._buffer.is_closing():
                self._buffer.stop_expecting()

        def eof_received(self) -> bool:  # type: ignore[override]
            """Whether to go on. A client that closes its side may wait for its answer or have left: both look the same
            until something is sent. To an HTTP/1.0 client nothing can be sent but the answer.
            """
            if self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self._head_timer:
                return False
            if self.scope["http_version"] == "1.0":
                return False
            if not self._half_closed:
                self._half_closed = True
                self._probe(0)
            return True

        def _probe(self, count: int) -> None:
            for wire in self._wires:
                if not wire.done:
                    wire.probe()
                    break
            wait_s = PROBES_S[min(count, len(PROBES_S) - 1)]
            self._probe_timer = self.loop.call_later(wait_s, self._probe, count + 1)

        def on_response_complete(self) -> None:
            self._expect_nothing()
            super().on_response_complete()
            if self._half_closed and self.cycle.response_complete:
                self.transport.close()

        def _send_refusal(self, error: ApiError) -> None:
            body = error.body()
            head = b"HTTP/1.1 %d %b" % (error.status, HTTPStatus(error.status).phrase.encode())
            head += b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
            self.transport.close()

        def _unset_keepalive_if_required(self) -> None:
            """uvicorn's, called for whatever comes. But the rest of a body that was refused before it was there, or a
            blank line, is no new request: after it nobody would end the connection any more.
            """

        def _expect_nothing(self) -> None:
            """Ends the wait for a next request."""
            super()._unset_keepalive_if_required()

        def _expect_head(self) -> None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(limits.header_timeout_s, self._on_slow_head)

        def _on_slow_head(self) -> None:
            if self.flow.read_paused:  # behind requests that wait for their turn: it is us who do not take it
                self._head_timer = self.loop.call_later(limits.header_timeout_s, self._on_slow_head)
            else:
                self.transport.close()

        def _head_arrived(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return LimitedProtocol


def _without_upgrade(data: bytes) -> bytes:
    """Rename the `Upgrade` header: the parser does not read the body of an upgrade request.

    Java's client asks for HTTP/2 so with its first request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest


def _head_too_large(limits: Limits) -> ApiError:
    return head_too_large(f"The request's head is larger than {limits.max_header_bytes} bytes")
