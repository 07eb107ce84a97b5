"""Limits on sizes and times of bodies, headers and the queue."""

import gzip
import json
import logging
import socket
import time
from collections.abc import Callable

import httpx
import openai
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.server.hosting import listen
from tests.server.fake_engine import Wait
from tests.server.live import LiveServer, http_post, read_all, read_error

Serve = Callable[..., LiveServer]
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

JSON = {"Content-Type": "application/json"}


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_declared_size(serve: Serve) -> None:
    server = serve(max_body_bytes=1000)
    with server.connect() as connection:
        connection.sendall(HEAD + b"content-length: 1001\r\n\r\n")
        raw = read_error(connection)  # before any byte of the body is sent
    assert raw.startswith(b"HTTP/1.1 413 ") and b'"code":"request_too_large"' in raw
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    with client, pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(model="fake", prompt="x" * 1_000_000)
    assert raised.value.status_code == 413
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_size_is_counted_while_reading(serve: Serve) -> None:
    server = serve(max_body_bytes=1000)
    with server.connect() as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(b"x" * 600))
        connection.sendall(chunked(b"x" * 401))  # the body is not complete
        raw = read_error(connection)
    assert raw.startswith(b"HTTP/1.1 413 ")

    def parts():  # type: ignore[no-untyped-def]
        yield from [b"x" * 1000] * 1000

    with server.client() as client:
        assert client.post("/v1/completions", content=parts(), headers=JSON).status_code == 413
    server.until(lambda: server.service.lifecycle.requests == 0)


def test_a_body_within_the_limit_passes(serve: Serve) -> None:
    server = serve(max_body_bytes=1000)
    body = b'{"prompt": "x", "user": "' + b"y" * 900 + b'"}'
    with server.client() as client:
        answer = client.post("/v1/completions", content=iter([body[:400], body[400:]]), headers=JSON)
    assert answer.status_code == 200


def test_slow_body(serve: Serve) -> None:
    server = serve(limits={"body_timeout_s": 0.1})
    with server.connect() as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        raw = read_error(connection)
    assert raw.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in raw


def test_slow_head(serve: Serve) -> None:
    server = serve(limits={"header_timeout_s": 0.1})
    for sent in (b"", b"POST /v1/comp", HEAD):
        with server.connect() as connection:
            connection.sendall(sent)
            assert read_all(connection) == b""
    with server.client() as client:  # the timer of the head stops with the head
        server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
        with server.connect() as connection:
            connection.sendall(http_post("/v1/completions", {"prompt": "x"}))
            server.until(lambda: bool(server.engine.live))
            time.sleep(0.2)
            server.call(server.engine.release)
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [b"".join(b"x-%d: 1\r\n" % i for i in range(300)), b"x-long: " + b"a" * 3_000_000, b"a" * 3_000_000],
)
def test_large_head(serve: Serve, headers: bytes) -> None:
    server = serve()
    with server.connect() as connection:
        raw = _send_and_read(connection, b"GET /health HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n\r\n")
    assert raw.startswith(b"HTTP/1.1 431 ") and b'"code":"head_too_large"' in raw


def test_the_largest_head_that_is_allowed(serve: Serve) -> None:
    server = serve(limits={"max_header_bytes": 1000})
    small = len("/health" + "host" + "localhost" + "x-pad")
    for pad, status in ((1000 - small, b"200"), (1001 - small, b"431")):
        head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-pad: " + b"a" * pad + b"\r\n\r\n"
        with server.connect() as connection:
            connection.sendall(head)
            assert connection.recv(100).startswith(b"HTTP/1.1 " + status)
    with server.connect() as connection:  # only heads count, not other data in the packet
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "user": "y" * 2000}) + head[:100])
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("head", "status", "said"),
    [
        ("GET /health HTTP/1.1\r\n", 400, "one Host header"),
        ("GET /health HTTP/1.1\r\nhost: a\r\nhost: a\r\n", 400, "one Host header"),
        ("GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n", 400, "one Host header"),
        ("GET /health HTTP/1.0\r\n", 200, ""),
        ("POST /ping HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n", 400, "'gzip, chunked'"),
        ("POST /ping HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", 400, "'gzip'"),
        ("GET /health HTTP/1.1\r\nhost: a\r\nbad header\r\n", 400, "Invalid HTTP request"),
    ],
)
def test_heads_that_are_rejected(
    server: LiveServer, head: str, status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as connection:
        connection.sendall(head.encode() + b"connection: close\r\n\r\n")
        raw = read_all(connection).decode()
    assert raw.startswith(f"HTTP/1.1 {status} ") and said in raw
    assert not caplog.records, "a client cannot fill the log"


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_request_is_answered_and_not_logged(
    server: LiveServer, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = f"connection: upgrade\r\nupgrade: {protocol}\r\nsec-websocket-key: x\r\nsec-websocket-version: 13"
    with server.connect() as connection:
        connection.sendall(f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{upgrade}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    with server.connect() as connection:  # like the first request of Java's client
        connection.sendall(http_post("/v1/completions", {"prompt": "x"}, upgrade))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def _send_and_read(connection: socket.socket, data: bytes) -> bytes:
    raw = b""
    try:
        connection.sendall(data)
        while part := connection.recv(65536):
            raw += part
    except OSError:  # reset by the server, which did not read all of it
        if not raw:
            raw = connection.recv(65536)
    return raw


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"1", b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\xff"}', b"[" * 50_000],
)
def test_bodies_other_than_json_objects(server: LiveServer, body: bytes) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200), ("application/json; charset=utf-8", 200), ("application/vnd.api+json", 200),
        ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("text/x+json", 415), ("", 415),
    ],
)  # fmt: skip
def test_content_type(server: LiveServer, kind: str, status: int) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert answer.status_code == status
    if status == 415:
        error = answer.json()["error"]
        assert error["code"] == "unsupported_media_type" and "application/json" in error["message"]


def test_a_body_needs_a_content_type(server: LiveServer) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", content=b'{"prompt": "x"}')
    assert answer.status_code == 415 and "the header is missing" in answer.json()["error"]["message"]


def test_a_compressed_body_is_rejected_by_name(server: LiveServer) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    for coding, content, status in (("gzip", gzip.compress(body), 415), ("Identity", body, 200)):
        answer = server.http.post("/v1/completions", content=content, headers=JSON | {"Content-Encoding": coding})
        assert answer.status_code == status
        assert ("Content-Encoding 'gzip' is not supported" in answer.text) == (status == 415)


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_1_0_answer_has_no_chunks(server: LiveServer, stream: bool) -> None:
    """HTTP/1.0 does not know them: the end of the connection is the end of the stream."""
    body = {"prompt": "x", "max_tokens": 3, "stream": stream}
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, answer = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head
    if stream:
        events = answer.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
    else:
        assert json.loads(answer)["object"] == "text_completion"


def test_lone_surrogates(server: LiveServer) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", content=b'{"prompt": "\\ud800"}', headers=JSON)
    assert answer.status_code == 400


def test_prompts_and_choices(serve: Serve) -> None:
    server = serve(max_prompts=4, max_choices=6)
    for fields, status in (
        ({"prompt": ["a"] * 4}, 200),
        ({"prompt": ["a"] * 5}, 400),
        ({"prompt": ["a"] * 3, "n": 2}, 200),
        ({"prompt": ["a"] * 4, "n": 2}, 400),
        ({"prompt": "a", "n": 7}, 400),
    ):
        assert server.post("/v1/completions", fields).status_code == status, fields


def test_all_logprobs_if_allowed(serve: Serve) -> None:
    server = serve(max_logprobs=-1)
    assert server.post("/v1/completions", {"prompt": "x", "logprobs": -1}).status_code == 200
    assert server.engine.requests[0].prompt.params.logprobs == -1
    assert server.post("/v1/completions", {"prompt": "x", "logprobs": -2}).status_code == 400


def test_full_queue(serve: Serve) -> None:
    server = serve(max_num_queued_reqs=2)
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": ["a", "b"]}))
        server.until(lambda: len(server.engine.live) == 2)
        assert server.get("/load").json() == {"server_load": 1}
        refused = server.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full" and refused.json()["error"]["type"] == "overloaded_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.get("/ready").status_code == 503 and server.get("/health").status_code == 200
        assert server.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
        server.call(server.engine.release)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    server.until(lambda: server.service.lifecycle.requests == 0)
    assert server.get("/ready").status_code == 200
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_openai_client_retries_a_full_queue(serve: Serve) -> None:
    server = serve(max_num_queued_reqs=1)
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x"}))
        server.until(lambda: len(server.engine.live) == 1)
        statuses: list[int] = []

        def note(response: httpx.Response) -> None:
            statuses.append(response.status_code)
            server.call(server.engine.release)

        http = httpx.Client(event_hooks={"response": [note]})
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=1, http_client=http) as client:
            assert client.completions.create(model="fake", prompt="x").choices[0].text
    assert statuses == [503, 200]


def test_small_writes_are_not_delayed() -> None:
    with listen(ServerConfig(port=0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
