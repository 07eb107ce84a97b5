"""Clients that read or write slowly, or not at all."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.server.fake_engine import Wait
from tests.server.live import PATIENCE_S, LiveServer, events, http_post, read_all, read_error

Serve = Callable[..., LiveServer]
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
# More than the kernel buffers for a client that does not read.
MUCH = 8 * 2**20


def long_stream(server: LiveServer, then_wait: bool = False) -> None:
    """Stream a token and then a large one. The engine's side then ends, or waits if `then_wait`."""

    def script(request: Any) -> list[Any]:
        first, *_, last = server.engine.default_script(request)
        last.text = "x" * MUCH
        between = [server.engine.sample(request, 0, "y" * 40)[1]]
        between[0].text, between[0].num_output_tokens = "x" * MUCH, 2
        return [first, *between, *([Wait()] if then_wait else []), last]

    server.engine.script = script


def unread_stream(server: LiveServer, fields: dict[str, Any] | None = None) -> socket.socket:
    """Open a stream as a client that reads only its first bytes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.settimeout(PATIENCE_S)
    connection.sendall(http_post("/v1/completions", {"prompt": "x", "stream": True} | (fields or {})))
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return connection


def send_to_engine(server: LiveServer, request: bytes) -> socket.socket:
    """Send a request, and wait until the engine has it."""
    connection = server.connect()
    connection.sendall(request)
    server.until(lambda: len(server.engine.live) == 1)
    return connection


def test_a_client_that_does_not_read_is_disconnected_and_its_request_aborted(serve: Serve) -> None:
    server = serve(write_timeout=0.2)
    long_stream(server, then_wait=True)
    with unread_stream(server):
        server.until(lambda: len(server.engine.cancelled) == 1)
        server.until(lambda: server.service.lifecycle.requests == 0)
    assert server.metric("roseinfer:requests_aborted_total", reason="disconnect") == 1


def test_a_finished_request_that_is_still_read_holds_no_slot(serve: Serve) -> None:
    server = serve(max_num_queued_reqs=2, write_timeout=60.0)
    long_stream(server)
    slow = [unread_stream(server) for _ in range(4)]
    server.until(lambda: not server.engine.live)
    server.until(lambda: server.service.lifecycle.requests == 0)
    assert server.get("/ready").status_code == 200
    server.engine.script = server.engine.default_script
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    for connection in slow:
        text = read_all_of(connection)
        assert events("data: " + text.split("data: ", 1)[1])[-1] == "[DONE]", "it is still told all of it"
        connection.close()


def read_all_of(connection: socket.socket) -> str:
    """Return the events of a chunked answer."""
    raw = bytearray()
    while not raw.endswith(b"0\r\n\r\n"):
        part = connection.recv(2**20)
        assert part
        raw += part
    at = raw.index(b"\r\n\r\n") + 4
    chunks = []
    while True:
        start = raw.index(b"\r\n", at) + 2
        size = int(raw[at : start - 2], 16)
        if size == 0:
            return b"".join(chunks).decode()
        chunks.append(raw[start : start + size])
        at = start + size + 2


def test_a_closed_connection_with_unread_data_is_ended(serve: Serve) -> None:
    server = serve(write_timeout=0.2)
    long_stream(server)
    with unread_stream(server) as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x"}, "connection: close"))
        server.until(lambda: len(server.connections()) <= 1)  # the remaining one is the test's client


def test_the_drain_does_not_wait_for_clients_that_do_not_read(serve: Serve) -> None:
    server = serve(write_timeout=60.0)
    long_stream(server)
    with unread_stream(server):
        server.until(lambda: not server.engine.live)
        server.call(server.service.lifecycle.begin_drain)
        server.until(lambda: server.service.lifecycle.requests == 0)
        server.run(server.service.wind_down(0.1))
        server.until(lambda: not server.service.lifecycle.delivering)


def test_a_drain_does_not_end_answers_that_are_being_encoded(serve: Serve) -> None:
    """Prompt log probabilities are encoded in threads after the engine has finished the request."""
    server = serve()
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    encoding, go_on = threading.Event(), threading.Event()
    offload = server.service.offload.run

    def held_back(work: Callable[..., Any], *args: Any) -> Any:
        encoding.set()
        assert go_on.wait(PATIENCE_S)
        return work(*args)

    server.service.offload.run = lambda work, *args, **options: offload(held_back, partial(work, **options), *args)
    go_on.set()
    wanted = {"prompt": "x", "stream": True, "echo": True, "logprobs": 1}
    with send_to_engine(server, http_post("/v1/completions", wanted, "connection: close")) as connection:
        encoding.clear(), go_on.clear()
        server.call(server.service.lifecycle.begin_drain)
        server.call(server.engine.release)
        server.run(server.service.lifecycle.idle())
        assert encoding.wait(PATIENCE_S)
        winding_down = threading.Thread(target=server.run, args=[server.service.wind_down(5.0)])
        winding_down.start()
        server.until(lambda: server.service.lifecycle.delivering == 1)
        go_on.set()
        winding_down.join()
        assert b"data: [DONE]" in read_all(connection)


# --- bodies -------------------------------------------------------------------------------------------------------
def start_body(server: LiveServer, sent: bytes = b"{", length: int = 100) -> socket.socket:
    connection = server.connect()
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % length + sent)
    return connection


def test_an_arriving_body_holds_no_slot(serve: Serve) -> None:
    server = serve(max_num_queued_reqs=2)
    slow = [start_body(server) for _ in range(5)]
    server.until(lambda: server.service.bodies.arriving == 5)
    assert server.get("/load").json() == {"server_load": 0}
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    for connection in slow:
        connection.close()
    server.until(lambda: server.service.bodies.arriving == 0)


def test_a_slot_is_taken_when_the_body_has_arrived(serve: Serve) -> None:
    server = serve(max_num_queued_reqs=1)
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    body = b'{"prompt": "x"}'
    with start_body(server, body[:4], len(body)) as late, server.connect() as first:
        server.until(lambda: server.service.bodies.arriving == 1)
        first.sendall(http_post("/v1/completions", {"prompt": "x"}))
        server.until(lambda: len(server.engine.live) == 1)
        late.sendall(body[4:])
        assert b'"code":"queue_full"' in read_error(late)
        server.call(server.engine.release)
        assert first.recv(15) == b"HTTP/1.1 200 OK"


def test_arriving_bodies_are_bounded_and_the_slowest_is_ended(serve: Serve) -> None:
    server = serve(max_body_readers=2, limits={"body_grace_s": 60.0})
    with start_body(server), start_body(server):
        server.until(lambda: server.service.bodies.arriving == 2)
        with start_body(server) as refused:
            raw = read_error(refused)
            assert raw.startswith(b"HTTP/1.1 503 ") and b'"code":"too_many_bodies"' in raw
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200, "its body came soon"
    assert server.metric("vllm:admission_rejections_total", reason="max_body_readers") == 1
    server.until(lambda: server.service.bodies.arriving == 0)
    server.service.limits = replace(server.service.limits, body_grace_s=0.0)
    with start_body(server) as oldest, start_body(server) as second:
        server.until(lambda: server.service.bodies.arriving == 2)
        with start_body(server) as third:
            assert read_error(oldest).startswith(b"HTTP/1.1 408 ")
            server.until(lambda: server.service.bodies.arriving == 2)
            assert third and second


def test_the_bytes_of_arriving_bodies_are_bounded(serve: Serve) -> None:
    server = serve(limits={"max_arriving_bytes": 300_000, "body_grace_s": 60.0})
    with start_body(server, b"x" * 200_000, 400_000):
        server.until(lambda: server.service.bodies.bytes >= 200_000)
        with start_body(server, b"x" * 200_000, 400_000) as refused:
            assert b'"code":"too_many_bodies"' in read_error(refused)
    server.until(lambda: (server.service.bodies.arriving, server.service.bodies.bytes) == (0, 0))


def test_arriving_bodies_end_with_the_server(serve: Serve) -> None:
    server = serve()
    with start_body(server) as slow:
        server.until(lambda: server.service.bodies.arriving == 1)
        server.call(server.service.lifecycle.begin_drain)
        server.run(server.service.wind_down(0.1))
        raw = read_error(slow)
        assert raw.startswith(b"HTTP/1.1 503 ") and b'"code":"draining"' in raw


@pytest.mark.parametrize("more", [b"{", b"x" * 100, b"\r\n"])
def test_data_after_an_answer_does_not_keep_a_connection_open(serve: Serve, more: bytes) -> None:
    server = serve(api_key=("secret",))
    with server.connect() as connection:
        server.until(lambda: len(server.connections()) == 1)
        server.call(lambda: setattr(server.connections()[0], "timeout_keep_alive", 0.3))
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % (0 if more == b"\r\n" else 100))
        assert b"401" in connection.recv(65536)
        connection.sendall(more)
        assert read_all(connection) == b""


def test_a_head_after_pipelined_requests_may_wait(serve: Serve) -> None:
    server = serve(limits={"header_timeout_s": 0.05})
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    request = http_post("/v1/completions", {"prompt": "x"})
    last = http_post("/v1/completions", {"prompt": "x"}, "connection: close")
    with send_to_engine(server, request) as connection:
        connection.sendall(request + last[:30])
        time.sleep(0.2)
        connection.sendall(last[30:])
        server.call(server.engine.release)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_garbage_after_a_request_is_rejected_after_its_answer(serve: Serve, stream: bool) -> None:
    server = serve(limits={"header_timeout_s": 0.05})
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    with send_to_engine(server, http_post("/v1/completions", {"prompt": "x", "stream": stream})) as connection:
        connection.sendall(b"POST garbage\r\n\r\n")
        time.sleep(0.1)
        connection.sendall(b"more garbage\r\n\r\n")
        server.call(server.engine.release)
        answer, rejection = read_all(connection).split(b"HTTP/1.1 400 Bad Request")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    assert b"Invalid HTTP request" in rejection and server.engine.cancelled == []


def test_a_broken_body_after_a_request_is_rejected_after_its_answer(serve: Serve) -> None:
    server = serve()
    with server.connect() as connection:
        request = http_post("/v1/completions", {"prompt": "x"})
        connection.sendall(request + HEAD + b"transfer-encoding: chunked\r\n\r\nno number\r\n")
        answer, rejection = read_all(connection).split(b"HTTP/1.1 400 Bad Request")
    assert answer.startswith(b"HTTP/1.1 200 OK") and b"Invalid HTTP request" in rejection


def test_what_follows_a_rejected_head_is_not_kept(serve: Serve) -> None:
    """A head of 32 MiB, most of which the server has read when all is sent: the kernel keeps less."""
    server = serve()
    server.engine.script = lambda request: [Wait()]
    with send_to_engine(server, http_post("/v1/completions", {"prompt": "x"})) as connection:
        tracemalloc.start()
        connection.sendall(HEAD + b"x: ")
        for _ in range(512):
            connection.sendall(b"y" * 2**16)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert server.engine.cancelled == []
    assert most < 2**22


def test_an_unfinished_head_after_a_request_does_not_cut_its_answer_off(serve: Serve) -> None:
    server = serve(limits={"header_timeout_s": 0.05})
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    with send_to_engine(server, http_post("/v1/completions", {"prompt": "x"})) as connection:
        connection.sendall(b"POST /v1")
        time.sleep(0.2)
        server.call(server.engine.release)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 1
    assert server.engine.cancelled == []


# --- half-closed --------------------------------------------------------------------------------------------------
def send_all(server: LiveServer, data: bytes) -> socket.socket:
    """Send a request and close the sending side of the connection."""
    connection = server.connect()
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_answer(serve: Serve, stream: bool) -> None:
    server = serve()
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    with send_all(server, http_post("/v1/completions", {"prompt": "x", "stream": stream})) as connection:
        server.until(lambda: len(server.engine.live) == 1)
        assert connection.recv(12) == b"HTTP/1.1 100", "a word that means nothing, to see whether anybody is there"
        server.call(server.engine.release)
        raw = read_all(connection)
    assert b"HTTP/1.1 200 OK" in raw and raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    assert server.engine.cancelled == []


def test_pipelined_requests_before_a_half_close_are_all_answered(serve: Serve) -> None:
    server = serve()
    with send_all(server, 3 * http_post("/v1/completions", {"prompt": "x"})) as connection:
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize(
    "data", [b"", HEAD, HEAD + b"content-length: 9\r\n\r\n{", http_post("/v1/completions", {"prompt": "x"})[:-1]]
)
def test_half_a_request_has_no_answer(serve: Serve, data: bytes) -> None:
    server = serve()
    with send_all(server, data) as connection:
        assert read_all(connection) == b""


def test_a_half_closed_http_1_0_client_has_left(serve: Serve) -> None:
    """HTTP/1.0 has no interim answers, so the connection cannot be probed."""
    server = serve()
    server.engine.script = lambda request: [Wait()]
    request = http_post("/v1/completions", {"prompt": "x"}).replace(b"HTTP/1.1", b"HTTP/1.0")
    with send_to_engine(server, request) as connection:
        connection.shutdown(socket.SHUT_WR)
        server.until(lambda: len(server.engine.cancelled) == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_that_leaves_is_noticed(serve: Serve, stream: bool) -> None:
    server = serve()
    first = server.engine.default_script
    server.engine.script = lambda request: [first(request)[0], Wait()]
    with send_all(server, http_post("/v1/completions", {"prompt": "x", "stream": stream})) as connection:
        server.until(lambda: len(server.engine.live) == 1)
        connection.recv(12)
    server.until(lambda: len(server.engine.cancelled) == 1)


def test_a_client_that_leaves_after_garbage_is_noticed(serve: Serve) -> None:
    server = serve()
    server.engine.script = lambda request: [Wait()]
    with send_to_engine(server, http_post("/v1/completions", {"prompt": "x"})) as connection:
        connection.sendall(b"POST garbage\r\n\r\n")
    server.until(lambda: len(server.engine.cancelled) == 1)
