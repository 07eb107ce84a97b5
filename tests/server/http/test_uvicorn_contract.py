"""Contract with uvicorn: every private name and behaviour of its protocol that `http/connection.py` relies on.

uvicorn promises none of this. If an upgrade breaks a test, adapt `LimitedProtocol` and the pin in pyproject.toml.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvicorn.protocols.http.auto
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from roseinfer.server.http.connection import EXTENSION, ClientConnection, limited_protocol
from roseinfer.server.http.limits import Limits
from roseinfer.server.http.write_buffer import WriteBuffer

GET = b"GET /path?q=1 HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n\r\n"
LIMITS = Limits(max_body_bytes=2**20, max_prompts=1, max_choices=1, max_logprobs=1, max_stop_strings=1)


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer without Content-Length, in two parts."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await send({"type": "http.response.body", "body": b"two"})


def _protocol(app: Any = _answer, kind: type[HttpToolsProtocol] = HttpToolsProtocol) -> Any:
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
    config.load()
    made: Any = kind(config=config, server_state=ServerState(), app_state={})
    made.connection_made(Transport())
    return made


def _in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# --- names and signatures ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("__init__", ["self", "config", "server_state", "app_state", "_loop"]),
        ("connection_made", ["self", "transport"]),
        ("connection_lost", ["self", "exc"]),
        ("data_received", ["self", "data"]),
        ("eof_received", ["self"]),
        ("pause_writing", ["self"]),
        ("resume_writing", ["self"]),
        ("on_message_begin", ["self"]),
        ("on_headers_complete", ["self"]),
        ("on_response_complete", ["self"]),
        ("_unset_keepalive_if_required", ["self"]),
    ],
)
def test_signature_of(method: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(HttpToolsProtocol, method)).parameters) == parameters


def test_no_new_callback_is_missed() -> None:
    """`LimitedProtocol` must know all entry points of the event loop and of the parser."""
    entry_points = {name for name in vars(HttpToolsProtocol) if name.startswith("on_") or name.endswith("_received")}
    assert entry_points == {
        "data_received",
        "eof_received",
        "on_body",
        "on_header",
        "on_headers_complete",
        "on_message_begin",
        "on_message_complete",
        "on_response_complete",
        "on_url",
    }


def test_names_that_are_ours_are_free() -> None:
    """uvicorn must not begin to use a name that `LimitedProtocol` adds."""
    ours = {name for kind in limited_protocol(LIMITS).__mro__[:2] for name in vars(kind) if not name.startswith("__")}
    uvicorns = {name for name in dir(HttpToolsProtocol) if not name.startswith("__")}
    overridden = {
        "connection_made",
        "connection_lost",
        "data_received",
        "eof_received",
        "pause_writing",
        "resume_writing",
        "on_message_begin",
        "on_headers_complete",
        "on_response_complete",
        "_unset_keepalive_if_required",
    }
    assert {name for name in ours & uvicorns if not name.startswith("_abc")} == overridden

    async def instance() -> None:
        assert not (vars(_protocol()).keys() & (ours - overridden))

    asyncio.run(instance())


def test_server_hooks() -> None:
    """Names of `uvicorn.Server` and of its lookup of the protocol that other modules use."""
    assert list(inspect.signature(uvicorn.Server.startup).parameters) == ["self", "sockets"]
    assert list(inspect.signature(uvicorn.Server.capture_signals).parameters) == ["self"]
    assert inspect.iscoroutinefunction(uvicorn.Server.serve)
    assert hasattr(uvicorn.protocols.http.auto, "AutoHTTPProtocol")
    config = uvicorn.Config(_answer, http=HttpToolsProtocol, lifespan="off", log_config=None)
    config.load()
    assert config.http_protocol_class is HttpToolsProtocol
    server = uvicorn.Server(config)
    assert isinstance(server.server_state, ServerState) and server.should_exit is False


# --- behaviour --------------------------------------------------------------------------------------------------
@_in_loop
async def test_state_of_a_new_connection() -> None:
    made = _protocol()
    assert made.cycle is None and isinstance(made.flow, FlowControl) and isinstance(made.transport, Transport)
    assert made.loop is asyncio.get_running_loop() and made.timeout_keep_alive_task is None


@_in_loop
async def test_state_of_a_request() -> None:
    """The head fills `url`, `headers` and `scope`; the task of the application starts in a later turn."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        await _answer(scope, receive, send)

    made = _protocol(app)
    made.data_received(POST)
    assert made.url == b"/" and made.headers == [(b"host", b"here"), (b"content-length", b"4")]
    cycle = made.cycle
    assert isinstance(cycle, RequestResponseCycle) and cycle.scope is made.scope and cycle.flow is made.flow
    assert made.scope["http_version"] == "1.1" and "extensions" not in made.scope
    assert cycle.more_body and not cycle.response_started and not cycle.response_complete and not seen
    made.data_received(b"body")
    assert not cycle.more_body
    await asyncio.sleep(0.01)
    assert seen == [cycle.scope] and cycle.response_started and cycle.response_complete


@_in_loop
async def test_an_answer_without_content_length_is_chunked() -> None:
    """`ClientConnection.write` adds chunks of its own between those of uvicorn."""
    made = _protocol()
    made.data_received(GET)
    await asyncio.sleep(0.01)
    head, _, body = made.transport.written.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head and body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    assert made.cycle.chunked_encoding is True


@_in_loop
async def test_a_request_sends_through_its_cycle() -> None:
    """`_send_without_chunks` replaces `send` of a cycle before its task runs, and sets what the cycle expects."""
    made = _protocol(kind=limited_protocol(LIMITS))
    transport = made.transport._transport
    made.data_received(GET.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert made.cycle.chunked_encoding is None and made.cycle.expected_content_length == 0
    await asyncio.sleep(0.01)
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and body == b"onetwo" and transport.closed


@_in_loop
async def test_the_keep_alive_timer() -> None:
    """A complete answer starts it, any data stops it through `_unset_keepalive_if_required`."""
    made = _protocol()
    made.data_received(GET)
    await asyncio.sleep(0.01)
    timer = made.timeout_keep_alive_task
    assert timer is not None and not timer.cancelled() and not made.transport.closed
    made._unset_keepalive_if_required()
    assert made.timeout_keep_alive_task is None and timer.cancelled()


@_in_loop
async def test_a_lost_connection_ends_the_request() -> None:
    made = _protocol()
    made.data_received(POST)
    made.connection_lost(None)
    assert made.cycle.disconnected and made.parser is None and made not in made.connections


@_in_loop
async def test_pipelined_requests_pause_reading() -> None:
    """A slow head is not the client's fault while `flow.read_paused` is set."""
    made = _protocol()
    made.data_received(GET + GET)
    assert made.flow.read_paused and len(made.pipeline) == 1
    await asyncio.sleep(0.01)
    assert not made.flow.read_paused and not made.pipeline and made.cycle.response_complete


@_in_loop
async def test_flow_control() -> None:
    made = _protocol()
    made.pause_writing()
    assert made.flow.write_paused
    made.resume_writing()
    assert not made.flow.write_paused


@_in_loop
async def test_what_limited_protocol_makes_of_it() -> None:
    closed: list[bool] = []
    made = _protocol(kind=limited_protocol(LIMITS, lambda: closed.append(True)))
    assert isinstance(made.transport, WriteBuffer)
    made.data_received(GET)
    connection = made.cycle.scope["extensions"][EXTENSION]
    assert isinstance(connection, ClientConnection) and not connection.response_complete
    await asyncio.sleep(0.01)
    assert connection.response_complete and connection.body_complete
    lost: list[bool] = []
    connection.on_disconnect(lambda: lost.append(True))
    made.connection_lost(None)
    assert lost == closed == [True]
