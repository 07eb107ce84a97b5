"""Standard-library client against a real server."""

import pytest

from roseinfer.cli.terminal.refusals import advice
from roseinfer.cli.terminal.remote import RefusedError, Remote, RemoteError, UnreachableError
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError, RequestFailedError
from roseinfer.core.slo import Cause
from tests.cli.terminal.saying import saying
from tests.server.fake_engine import Wait, rejected
from tests.server.live import LiveServer

BODY = {"model": "fake", "prompt": "hi", "max_tokens": 8}
OK = b"HTTP/1.1 200 OK\r\n\r\n"
REPLY = "hello world, def words"


def streamed(remote: Remote, **fields: object) -> str:
    events = list(remote.stream("/v1/completions", {**BODY, **fields}))
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_stream(server: LiveServer) -> None:
    assert streamed(Remote(server.url)) == streamed(Remote(f"{server.url}/v1/")) == REPLY


def test_models(server: LiveServer) -> None:
    assert list(Remote(server.url).models()) == ["fake"]


def test_a_refusal_before_the_stream(server: LiveServer) -> None:
    server.engine.script = lambda request: [rejected(cause=Cause.QUEUE)]
    with pytest.raises(RefusedError) as refused:
        streamed(Remote(server.url), slo={"ttft_ms": 1})
    assert (refused.value.status, refused.value.code, refused.value.error["cause"]) == (
        429,
        "slo_unattainable",
        "queue",
    )


def test_a_failure_in_the_stream(server: LiveServer) -> None:
    def script(request: object) -> list:  # type: ignore[type-arg]
        return [*server.engine.default_script(request)[:2], RequestFailedError("secret")]  # type: ignore[arg-type]

    server.engine.script = script
    with pytest.raises(RefusedError, match="the answer failed: The engine could not complete"):
        streamed(Remote(server.url))


def test_who_leaves_early_ends_the_request(server: LiveServer) -> None:
    def script(request: object) -> list:  # type: ignore[type-arg]
        first, *rest = server.engine.default_script(request)  # type: ignore[arg-type]
        return [first, Wait(), *rest]

    server.engine.script = script
    events = Remote(server.url).stream("/v1/completions", BODY)
    assert next(events)["choices"][0]["text"] == "hello"
    events.close()  # type: ignore[attr-defined]
    server.until(lambda: bool(server.engine.cancelled))


def test_keys(tokenizer: object) -> None:
    with LiveServer(tokenizer, ServerConfig(api_key=("right",))) as server:  # type: ignore[arg-type]
        assert streamed(Remote(server.url, "right")) == REPLY
        with pytest.raises(RefusedError) as refused:
            streamed(Remote(server.url, "wrong"))
        assert refused.value.code == "invalid_api_key"


def test_nobody_there() -> None:
    with pytest.raises(UnreachableError, match=r"cannot reach .*: Connection refused"):
        Remote("http://127.0.0.1:1").models()


@pytest.mark.parametrize("url", ["http://", "ftp://x", "127.0.0.1:8000", "http://x:port"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        Remote(url)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\nnope", "rejected \\(502\\): nope"),
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 15\r\n\r\n<!DOCTYPE HTML>",
            "rejected \\(404\\): the answer is a web page",
        ),
        (b'HTTP/1.1 400 Bad\r\nContent-Length: 16\r\n\r\n{"error": "why"}', "rejected \\(400\\): why"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": []}\n\n', "closed the connection before the end"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {", "not JSON"),
        (b"SSH-2.0-OpenSSH\r\n", "cannot reach .*: SSH-2.0"),
    ],
)
def test_other_servers(answer: bytes, error: str) -> None:
    with saying(answer) as url, pytest.raises(RemoteError, match=error):
        streamed(Remote(url))


@pytest.mark.parametrize(("url", "key"), [("http://127.0.0.1:8000/é", None), ("http://127.0.0.1:8000", "ключ")])
def test_what_no_request_can_carry_is_refused_before_it_is_made(url: str, key: str | None) -> None:
    with pytest.raises(ConfigError, match=r"url|api_key"):
        Remote(url, key)


def test_events_that_are_odd() -> None:
    with saying(OK + b'data: {"choices": [], "error": null}\n\ndata: [DONE]\n\n') as url:
        assert list(Remote(url).stream("/v1/completions", BODY)) == [{"choices": [], "error": None}]
    with saying(OK + b"data: 5\n\n") as url, pytest.raises(RemoteError, match="not a JSON object"):
        list(Remote(url).stream("/v1/completions", BODY))


def test_a_list_of_models_that_is_odd() -> None:
    for body in (b'{"data": null}', b'{"data": [1, {}]}', b"[]"):
        with saying(OK + body) as url:
            assert Remote(url).models() == {}


def test_every_cause_of_a_refusal_has_words() -> None:
    for cause in set(Cause) - {
        Cause.LOAD,
        Cause.PARENT,
        Cause.GRAMMAR,
        Cause.OTHER,
    }:  # causes that only waiting requests have, or that explain nothing
        error = RefusedError(429, {"code": "slo_unattainable", "cause": cause.value, "reason": "e2e"})
        assert next(advice(error)).startswith("cause: "), cause
