"""HTTP connections: uvicorn's protocol with limits on heads, and the view of a connection that each request gets.

uvicorn has no public hooks for this. `tests/server/http/test_uvicorn_contract.py` checks every name that is used here,
and pyproject.toml pins uvicorn to the tested minor version.
"""

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, cast

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from roseinfer.server.http.errors import ApiError, bad_request, head_too_large
from roseinfer.server.http.limits import Limits
from roseinfer.server.http.write_buffer import WriteBuffer

# Name of the `ClientConnection` in the extensions of a request's scope.
EXTENSION = "roseinfer.wire"
# Intervals at which a half-closed connection is probed; the last one repeats.
PROBES_S = (0.1, 0.5, 15.0)
# Most that the event loops read from a connection at a time.
MAX_READ_BYTES = 2**18
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class ClientConnection:
    """Connection as seen by one request.

    `filler`: data without meaning that may be written between two parts of a started answer; empty if there is none.
    """

    __slots__ = ("_buffer", "_cycle", "_lost", "_on_disconnect", "filler")

    def __init__(self, buffer: WriteBuffer, cycle: RequestResponseCycle) -> None:
        self._buffer = buffer
        self._cycle = cycle
        self._lost = False
        self._on_disconnect: Callable[[], None] | None = None
        self.filler = b""

    @property
    def response_complete(self) -> bool:
        return self._cycle.response_complete

    @property
    def body_complete(self) -> bool:
        """True if all of the request's body has arrived."""
        return not self._cycle.more_body

    @property
    def write_paused(self) -> bool:
        """True if the client reads more slowly than it is sent data, which would pile up."""
        return self._cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Write a part of a body without Content-Length, at once."""
        if not self._lost:
            self._buffer.write_through(b"%x\r\n%b\r\n" % (len(data), data) if self._cycle.chunked_encoding else data)

    def abort(self) -> None:
        """Close the connection and drop unsent data."""
        self._buffer.abort()

    def probe(self) -> None:
        """Write data without meaning. If the client has left, its host answers with a reset, which ends the connection.

        A client that has only closed its sending side ignores the data.
        """
        if not self._cycle.response_started:
            self._buffer.write(_INTERIM)
        elif self.filler and not self.write_paused:
            self.write(self.filler)

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` when the client disconnects, or now if it has. None removes the callback."""
        self._on_disconnect = callback
        if self._lost and callback is not None:
            callback()

    def mark_lost(self) -> None:
        self._lost = True
        if self._on_disconnect is not None:
            self._on_disconnect()


class HeadRejectedError(Exception):
    """Raised in a parser callback to end the parsing of a connection."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with `limits` on heads and on writes, and with support for half-closed connections.

    A request to change the protocol is served as plain HTTP.
    """

    limits: ClassVar[Limits]

    _head_timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
    _head_bytes = 0  # of an incomplete head, and of what preceded it in the same read
    _read_bytes = 0  # of the read that is being parsed
    _rejection: ApiError | None = None
    _client_connections: tuple[ClientConnection, ...] = ()  # several if the client pipelines requests
    _buffer: WriteBuffer
    _reads_no_more = False  # its client has closed its sending side, or sent what is no HTTP
    _late_rejection: ApiError | None = None  # to send after the answers to earlier requests
    _probe_timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._buffer = WriteBuffer(cast(asyncio.Transport, transport), self.loop, self.limits.write_timeout_s)
        super().connection_made(self._buffer)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_keep_alive_timer()
        self._buffer.stop_expecting()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)
        for connection in self._client_connections:
            connection.mark_lost()
        self._on_closed()

    def data_received(self, data: bytes) -> None:
        if self._late_rejection is not None:  # the parser would keep an endless head
            return
        self._read_bytes = len(data)
        try:
            # Only heads are searched: bodies can be long.
            may_upgrade = self._head_timer is not None and b"pgrade" in data
            self.parser.feed_data(_without_upgrade(data) if may_upgrade else data)
        except HttpParserUpgrade:
            pass
        except HttpParserError:
            self._send_rejection(self._rejection or bad_request("Invalid HTTP request received."))
            return
        if self._head_timer is None or self.transport.is_closing():
            return
        # The parser does not expose an unfinished header, so the bytes that it was fed count.
        self._head_bytes += len(data)
        if self._head_bytes > self.limits.max_header_bytes + MAX_READ_BYTES:
            self._send_rejection(_head_too_large(self.limits))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True to keep the connection open for the answer.

        A client that closes its sending side may wait for the answer or have left. The difference shows only when data
        is sent to it, and an HTTP/1.0 client can be sent nothing but the answer.
        """
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self._head_timer:
            return False
        if self.scope["http_version"] == "1.0" or self.scope["scheme"] == "https":  # TLS cannot be half closed
            return False
        self._reads_no_more = True
        if self._probe_timer is None:
            self._probe(0)
        return True

    def _probe(self, count: int) -> None:
        current = next((each for each in self._client_connections if not each.response_complete), None)
        if current is not None:
            current.probe()
        wait_s = PROBES_S[min(count, len(PROBES_S) - 1)]
        self._probe_timer = self.loop.call_later(wait_s, self._probe, count + 1)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._buffer.expect_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._buffer.is_closing():
            self._buffer.stop_expecting()

    # --- parser callbacks ---------------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        self._stop_keep_alive_timer()
        super().on_message_begin()
        if self._head_timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._stop_keep_alive_timer()
        self._rejection = self._check_head()
        if self._rejection is not None:
            raise HeadRejectedError
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)
        connection = ClientConnection(self._buffer, self.cycle)
        self._client_connections = (*[one for one in self._client_connections if not one.response_complete], connection)
        self.scope["extensions"] = {EXTENSION: connection}  # type: ignore[dict-item]

    def _check_head(self) -> ApiError | None:
        limits, headers = self.limits, self.headers
        if len(headers) > limits.max_header_count:
            return head_too_large(f"The request has more than {limits.max_header_count} headers")
        # These bytes include parts of other requests, so the head itself may be small enough.
        if self._head_bytes + self._read_bytes > limits.max_header_bytes:
            size = len(self.url) + sum(len(name) + len(value) for name, value in headers)
            if size > limits.max_header_bytes:
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

    # --- uvicorn's callbacks ------------------------------------------------------------------------------------
    def on_response_complete(self) -> None:
        self._stop_keep_alive_timer()
        super().on_response_complete()
        if self._reads_no_more:
            self._close_after_answers()

    def _unset_keepalive_if_required(self) -> None:
        """Keep the timer, which uvicorn would stop on any data.

        The rest of a rejected body or a blank line starts no request, and would leave a connection that never ends.
        """

    # --- helpers ------------------------------------------------------------------------------------------------
    def _on_closed(self) -> None:
        """Do nothing; `limited_protocol` replaces it."""

    def _stop_keep_alive_timer(self) -> None:
        super()._unset_keepalive_if_required()

    def _start_head_timer(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._on_slow_head)

    def _on_slow_head(self) -> None:
        if self._is_answering():  # closing would cut that answer off, and the server may have stopped reading
            self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._on_slow_head)
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _is_answering(self) -> bool:
        """True if a request that has arrived as a whole has no complete answer yet."""
        return any(each.body_complete and not each.response_complete for each in self._client_connections)

    def _close_after_answers(self) -> None:
        if self._late_rejection is not None:
            self._send_rejection(self._late_rejection)
        elif self.cycle.response_complete:
            self.transport.close()

    def _send_rejection(self, error: ApiError) -> None:
        """Send an error and disconnect, after the answers to earlier requests: it would become a part of them."""
        if self._is_answering():
            self._reads_no_more, self._late_rejection = True, error
            self._stop_head_timer()
            return
        body = error.body()
        head = b"HTTP/1.1 %d %b" % (error.status, HTTPStatus(error.status).phrase.encode())
        head += b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self.transport.close()


def limited_protocol(limits: Limits, on_closed: Callable[[], None] | None = None) -> type[HttpToolsProtocol]:
    """Return a connection class for uvicorn with these limits. `on_closed` is called when a connection has ended."""
    attributes: dict[str, Any] = {"limits": limits}
    if on_closed is not None:
        attributes["_on_closed"] = lambda self: on_closed()
    return type("LimitedProtocol", (LimitedProtocol,), attributes)


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection end a body without Content-Length, as HTTP/1.0 has no chunks."""
    send, unsized = cycle.send, False

    async def send_plain(message: Any) -> None:
        nonlocal unsized
        if message["type"] == "http.response.start":
            unsized = b"content-length" not in dict(message["headers"])
            cycle.chunked_encoding = False if unsized else None
        elif message["type"] == "http.response.body" and unsized:
            cycle.expected_content_length = len(message["body"])
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def _without_upgrade(data: bytes) -> bytes:
    """Rename the `Upgrade` header, since the parser does not read the body of an upgrade request.

    Java's HTTP client sends the header with its first request, to ask for HTTP/2.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest


def _head_too_large(limits: Limits) -> ApiError:
    return head_too_large(f"The request's head is larger than {limits.max_header_bytes} bytes")
