"""A client that leaves takes its work with it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import Wait
from tests.server.live import LiveServer, http_post


@pytest.fixture(autouse=True)
def waiting(server: LiveServer) -> Iterator[None]:
    script = server.engine.default_script
    server.engine.script = lambda request: [script(request)[0], Wait()]
    yield
    server.until(lambda: not server.engine.live)
    assert server.call(lambda: (server.service.lifecycle.requests, server.service.lifecycle.room.prompts)) == (0, 0)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["a", "b"]}])
@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels(server: LiveServer, fields: dict[str, Any], stream: bool) -> None:
    body = {"prompt": "x", "stream": stream} | fields
    prompts = len(body["prompt"])
    before = server.metric("roseinfer:requests_aborted_total", reason="disconnect")
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", body))
        server.until(lambda: len(server.engine.live) == prompts)
        if stream:
            assert connection.recv(1024)
    server.until(lambda: len(server.engine.cancelled) == prompts)
    assert server.metric("roseinfer:requests_aborted_total", reason="disconnect") == before + 1
    assert server.metric("vllm:request_success_total", finished_reason="abort") > 0


def test_leaving_a_stream_half_way(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            next(answer.iter_lines())
        server.until(lambda: len(server.engine.cancelled) == 1)


def test_leaving_before_the_body_is_complete(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x"})[:-5])
        server.until(lambda: server.service.bodies.arriving == 1)
    server.until(lambda: server.service.bodies.arriving == 0)
    assert not server.engine.requests


def test_a_connection_is_reused_after_a_stream(server: LiveServer) -> None:
    server.engine.script = server.engine.default_script
    with server.client() as client:
        for stream in (True, False, True):
            assert client.post("/v1/completions", json={"prompt": "x", "stream": stream}).status_code == 200
    assert server.engine.cancelled == []
