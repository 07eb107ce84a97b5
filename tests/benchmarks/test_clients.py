"""benchmarks.clients: reading and shortening requests and answers of the three APIs."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.clients.agents import ClaudeCode, Codex, OpenCode
from benchmarks.clients.place import Run
from benchmarks.clients.proxy import ANSWER_TOKENS, Exchange, Proxy, Shortener
from benchmarks.clients.python_clients import CLIENTS, step_errors
from benchmarks.clients.report import Row, table
from benchmarks.clients.wire import Usage, api_of, events, failure, shared_start

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = "Please call the tool weather once."
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages?beta=true"
TOOLS = {
    CHAT: {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    RESPONSES: {"type": "function", "name": "weather", "parameters": SCHEMA},
    MESSAGES: {"name": "weather", "input_schema": SCHEMA},
}
FORCED = {
    CHAT: {"type": "function", "function": {"name": "weather"}},
    RESPONSES: {"type": "function", "name": "weather"},
    MESSAGES: {"type": "tool", "name": "weather"},
}
RESULTS = {
    CHAT: [{"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "rain"}],
    RESPONSES: [{"type": "function_call"}, {"type": "function_call_output", "output": "rain"}],
    MESSAGES: [
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "tool_result", "content": "rain"}]},
    ],
}
PATHS = (CHAT, RESPONSES, MESSAGES)


@pytest.fixture(scope="module")
def shortener(tmp_path_factory: pytest.TempPathFactory) -> Shortener:
    vocab = {token: id for id, token in enumerate(["<|im_end|>", "Ġreturn", '"', "}"])}
    added = [{"content": "<tool_call>", "id": 9}]
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    return Shortener(folder)


def body(path: str, text: str, *more: dict[str, Any]) -> dict[str, Any]:
    key = "input" if path == RESPONSES else "messages"
    parts = [{"type": "text", "text": "Reminder."}, {"type": "text", "text": text}]
    return {key: [{"role": "user", "content": parts}, *more], "tools": [TOOLS[path]]}


@pytest.mark.parametrize("path", PATHS)
def test_a_call_is_forced_where_the_newest_text_asks_for_it(shortener: Shortener, path: str) -> None:
    asked = body(path, CALL)
    shortener.rewrite(api_of(path), asked)
    assert asked["tool_choice"] == FORCED[path] and "min_tokens" not in asked
    continued = body(path, CALL, *RESULTS[path])
    shortener.rewrite(api_of(path), continued)
    assert "tool_choice" not in continued
    assert continued["min_tokens"] == ANSWER_TOKENS and continued["logit_bias"]["9"] == -100


@pytest.mark.parametrize("path", PATHS)
def test_no_other_tool_is_called(shortener: Shortener, path: str) -> None:
    for text in ("Say hello.", "Call the tool shell."):
        asked = body(path, text)
        shortener.rewrite(api_of(path), asked)
        assert "tool_choice" not in asked and asked["logit_bias"]["9"] == -100


@pytest.mark.parametrize("path", PATHS)
def test_arguments_are_constrained(shortener: Shortener, path: str) -> None:
    shortener.arguments = {"weather": {"enum": [{}]}}
    asked = body(path, "Say hello.")
    shortener.rewrite(api_of(path), asked)
    shortener.arguments = {}
    assert json.dumps({"enum": [{}]}) in json.dumps(asked["tools"])


@pytest.mark.parametrize("path", PATHS)
def test_what_is_shared(path: str) -> None:
    first, second = body(path, "One.", {"role": "user", "content": "x"}), body(path, "Two.", {"role": "system"})
    cut = shared_start(first, second)
    (turn,) = cut["input" if path == RESPONSES else "messages"]
    assert turn["content"] == [{"type": "text", "text": "Reminder."}] and cut["tools"] == second["tools"]
    assert len(second["input" if path == RESPONSES else "messages"]) == 2


def test_usage() -> None:
    chat = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}}
    responses = {"response": {"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 5}}}}
    messages = {"message": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 5}}}
    for path, event in ((CHAT, chat), (RESPONSES, responses), (MESSAGES, messages)):
        assert api_of(path).usage(event) == Usage(9, 5)
        assert api_of(path).usage({}) is None


def test_events_and_failures() -> None:
    stream = 'event: error\ndata: {"type": "error", "error": {"message": "late"}}\n\ndata: [DONE]\n'
    assert [failure(event) for event in events(stream)] == ["late"]
    assert [failure(event) for event in events('{"error": "gone"}')] == ["gone"]
    assert api_of("/v1/messages/count_tokens") is None


def test_counts_of_a_row() -> None:
    answered = Exchange("POST", CHAT, body(CHAT, CALL), 200, "{}")
    continued = Exchange("POST", CHAT, body(CHAT, CALL, *RESULTS[CHAT]), 200, "{}")
    refused = Exchange("POST", CHAT, body(CHAT, "x"), 400, '{"error": {"message": "no"}}')
    probed = Exchange("HEAD", "/", None, 200)
    negotiated = Exchange("POST", MESSAGES, body(MESSAGES, "x"), 400)
    negotiated.answer = '{"error": {"message": "no", "details": {"error_code": "thread_unsupported_request"}}}'
    exchanges = [answered, continued, refused, probed, negotiated]
    for exchange in exchanges:
        exchange.close()
    row = Row("one", "1.0", exchanges, cached=0.5)
    assert (row.turns, row.round_trips, row.all_errors) == (2, 1, ["POST /v1/chat/completions: 400 no"])
    assert table([row]).splitlines()[2] == "| one | 1.0 | 2 | 1 | 50.0% | 1 |"
    row.errors = ["step: Error code: 400 - no"]
    assert row.all_errors == row.errors, "a failure that the client reported is counted once"


def test_steps_of_a_script() -> None:
    passed, failed = '{"step": "a", "error": null}', '{"step": "b", "error": "E: x"}'
    assert step_errors(Run(0, f"noise\n{passed}")) == []
    assert step_errors(Run(0, f"{passed}\n{failed}")) == ["b: E: x"]
    assert step_errors(Run(1, f"{passed}\ncrash")) and step_errors(Run(0, ""))


def test_failures_that_agents_report() -> None:
    assert Codex().errors(Run(1, '{"type": "error", "message": "refused"}')) == ["refused"]
    assert ClaudeCode().errors(Run(0, '{"is_error": true, "result": "refused"}')) == ["refused"]
    assert OpenCode().errors(Run(0, '{"type": "error", "error": "refused"}')) == ["refused"]
    assert OpenCode().errors(Run(3, "no line")) == ["exit code 3: no line"]


def test_every_client_has_its_script() -> None:
    scripts = {path.stem for path in Path("benchmarks/clients/pypi").glob("use_*.py")}
    assert {client.script.stem for client in CLIENTS} == scripts


@pytest.fixture
def upstream() -> Iterator[str]:
    """Server that answers with the body it received, as a stream."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"usage": {"prompt_tokens": 3}}\n\ndata: ' + data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_proxy_passes_on_and_logs(shortener: Shortener, upstream: str) -> None:
    with Proxy(upstream, shortener) as proxy:
        asked = body(CHAT, "Say hello.")
        answer = httpx.post(f"{proxy.url}{CHAT}", json=asked, timeout=60)
    (exchange,) = proxy.exchanges
    assert answer.text == exchange.answer and "min_tokens" in answer.text
    assert exchange.sent == asked and exchange.usage == Usage(3, 0) and exchange.status == 200
