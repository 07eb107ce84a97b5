"""Text of a request: how much there may be of it, and who waits for it how long."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from starlette.types import Receive, Scope, Send
from tokenizers import Regex, pre_tokenizers

from roseinfer.core.errors import InvalidRequestError
from roseinfer.server.http.errors import unavailable
from roseinfer.server.http.middleware import CrashMiddleware
from roseinfer.text.tokenizer import Tokenizer
from tests.server.conftest import Serve
from tests.server.live import LiveServer, http_post, read_error
from tests.text.tokenizers import byte_level

LONG = "word " * 100_000  # the context is 64 tokens
CHAT = [{"role": "user", "content": LONG}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": ["x", "y"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/responses", {"input": "x", "store": False}),
    ("/v1/responses/input_tokens", {"input": "x"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
    ("/tokenize", {"prompt": "x"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
    ("/detokenize", {"tokens": [1]}),
]


class Waiting:
    """Text work that never ends. `jobs`: how many wait."""

    def __init__(self) -> None:
        self.jobs = 0

    async def perform(self, *args: Any) -> None:
        self.jobs += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.jobs -= 1


@pytest.fixture
def waiting(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    made = Waiting()
    monkeypatch.setattr(server.service.texts, "perform", made.perform)
    yield made
    assert server.call(lambda: server.service.lifecycle.requests) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["x", LONG]}),
        ("/v1/completions", {"prompt": [5] * 65, "echo": True}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": LONG, "store": False}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": CHAT}),
        ("/detokenize", {"tokens": [5] * 65}),
    ],
)
def test_what_cannot_fit_costs_no_text_work(
    server: LiveServer, waiting: Waiting, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert "context" in answer.text or "too long" in answer.text


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": LONG}), ("/v1/chat/completions", {"messages": CHAT})]
)
def test_of_a_prompt_that_is_cut_only_the_end_is_tokenised(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, {**body, "truncate_prompt_tokens": 5, "max_tokens": 4}).status_code == 200
    assert len(server.engine.requests[-1].prompt.ids) == 5
    assert server.engine.requests[-1].prompt.ids[1:] != [], "a BOS, or what stood last"


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_client_that_leaves_frees_its_place(
    server: LiveServer, waiting: Waiting, path: str, body: dict[str, Any]
) -> None:
    with server.connect() as connection:
        connection.sendall(http_post(path, body))
        server.until(lambda: waiting.jobs == 1)
    server.until(lambda: waiting.jobs == 0)
    server.until(lambda: server.service.lifecycle.requests == 0)


@pytest.mark.parametrize("limit", [{"timeout_s": 0.05}, {"deadline_ms": 50}])
@pytest.mark.parametrize(("path", "body"), ROUTES[:3])
def test_the_deadline_counts_while_text_work_waits(
    server: LiveServer, waiting: Waiting, path: str, body: dict[str, Any], limit: dict[str, float]
) -> None:
    answer = server.post(path, {**body, **limit})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_shutdown_ends_what_waits(serve: Serve) -> None:
    server = serve()
    made = Waiting()
    server.service.texts.perform = made.perform  # type: ignore[method-assign,union-attr,assignment]
    connections = [server.connect() for _ in ROUTES]
    for connection, (path, body) in zip(connections, ROUTES, strict=True):
        connection.sendall(http_post(path, body))
    server.until(lambda: made.jobs == len(ROUTES))
    server.call(server.service.lifecycle.begin_drain)
    server.run(server.service.wind_down(5.0))
    for connection, (path, _) in zip(connections, ROUTES, strict=True):
        with connection:
            answer = read_error(connection)
            assert answer.startswith(b"HTTP/1.1 503 "), path
            assert b"The server is shutting down" in answer, path


def test_a_drain_fails_text_work_that_has_not_started(serve: Serve) -> None:
    server = serve()
    server.call(server.service.lifecycle.begin_drain)

    async def perform() -> Any:
        assert server.service.backend.prompts is not None
        return await server.service.backend.prompts.text([1])

    with pytest.raises(Exception, match="shutting down"):
        server.run(perform())


def test_errors_of_text_work_reach_the_client(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, status, code in (
        (unavailable("text_queue_full", "Too much text", 2.0), 503, "text_queue_full"),
        (InvalidRequestError("too much", None, "text_too_costly"), 400, "text_too_costly"),
    ):

        async def perform(*args: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(server.service.texts, "perform", perform)
        answer = server.post("/v1/completions", {"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_text_work_is_timed_by_lane(server: LiveServer) -> None:
    def counts() -> list[float]:
        return [server.metric("roseinfer:text_seconds_count", lane=lane) for lane in ("short", "chat")]

    before = counts()
    server.post("/v1/completions", {"prompt": "x"})
    assert counts() == [before[0] + 1, before[1]]
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert counts() == [before[0] + 1, before[1] + 1]


def test_token_strings_of_few_tokens_only(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.text.worker.perform.MAX_LISTED_STRINGS", 2)
    answer = server.post("/tokenize", {"prompt": "a b c d", "return_token_strs": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_token_strs")
    assert server.post("/tokenize", {"prompt": "a b c d"}).json()["count"] > 2


# --- panics of libraries in Rust, which are no subclasses of Exception ------------------------------------------------
def test_a_panic_of_the_tokenizer_is_an_ordinary_error(caplog: pytest.LogCaptureFixture) -> None:
    plain = byte_level()
    backend = tokenizers.Tokenizer.from_str(plain.backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$|(x*)*y"), "isolated")
    failing = "a" * 48 + "b"
    with LiveServer(Tokenizer(backend, plain.config, plain.chat_template)) as server:
        for path, body in (
            ("/v1/completions", {"prompt": failing}),
            ("/v1/messages", {"messages": [{"role": "user", "content": failing}], "max_tokens": 4}),
        ):
            caplog.clear()
            answer = server.post(path, body)
            assert answer.status_code == 500 and answer.headers["x-request-id"]
            assert "The tokenizer failed" in answer.json()["error"]["message"]
            lines = [record for record in caplog.records if record.levelname == "ERROR"]
            assert len(lines) == 1 and lines[0].exc_info is None


@pytest.mark.parametrize("caught", [True, False])
def test_the_last_net_catches_panics_and_nothing_else_of_their_kind(caught: bool) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    error = panic("index out of bounds") if caught else asyncio.CancelledError()
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    async def send(message: Any) -> None:
        sent.append(message)

    async def call() -> None:
        scope = {"type": "http", "state": {"request_id": "r", "status": 0}}
        await CrashMiddleware(app)(scope, None, send)  # type: ignore[arg-type]

    if caught:
        asyncio.run(call())
        assert sent[0]["status"] == 500 and b"internal_error" in sent[1]["body"]
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(call())
