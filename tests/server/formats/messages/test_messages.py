"""/v1/messages over HTTP, with anthropic's client where it can send it, and errors in its form."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from roseinfer.core.errors import EngineDeadError
from roseinfer.server.formats.messages.document import Message, MessageErrorBody, TokenCount
from roseinfer.server.http.errors import ApiError
from tests.helpers.engine_info import changed
from tests.server.fake_engine import INFO, Wait, dead, rejected, timed_out
from tests.server.formats.played import parsed
from tests.server.live import LiveServer, http_post, read_all
from tests.text.tokenizers import tool_caller

Serve = Callable[..., LiveServer]
PATH = "/v1/messages"
HI = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 3, "messages": HI}


def made(server: LiveServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        **{"base_url": server.url, "api_key": "none", "max_retries": 0, "timeout": 10.0} | options
    )


@pytest.fixture(scope="module")
def shared_claude(shared: LiveServer) -> Iterator[anthropic.Anthropic]:
    with made(shared) as client:
        yield client


@pytest.fixture
def claude(shared_claude: anthropic.Anthropic, server: LiveServer) -> anthropic.Anthropic:
    return shared_claude


def test_text_and_prompt(claude: anthropic.Anthropic, server: LiveServer) -> None:
    message = claude.messages.create(**BODY, system="world")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "hello world,"}]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "fake", "max_tokens")
    request = server.engine.requests[0]
    prompt = server.tokenizer.decode(request.prompt.ids, skip_special_tokens=False)
    assert prompt == "<|endoftext|><|system|>world<|end|><|user|>hello<|end|><|assistant|>"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(request.prompt.ids), 3)
    assert message.id == f"msg_{message._request_id}"


def test_a_stream_says_the_same(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**BODY)
    with claude.messages.stream(**BODY) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert texts == ["hello", " world", ","] and final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


def test_a_message_is_gone_on_with(claude: anthropic.Anthropic, server: LiveServer) -> None:
    claude.messages.create(**BODY | {"messages": [*HI, {"role": "assistant", "content": "def f"}]})
    prompt = server.tokenizer.decode(server.engine.requests[0].prompt.ids, skip_special_tokens=False)
    assert prompt.endswith("<|assistant|>def f")


def test_token_counts_are_those_of_the_messages(claude: anthropic.Anthropic, server: LiveServer) -> None:
    counted = claude.messages.count_tokens(model="fake", messages=HI, system="world")  # type: ignore[arg-type]
    assert counted.input_tokens == claude.messages.create(**BODY, system="world").usage.input_tokens
    TokenCount.model_validate(server.post(f"{PATH}/count_tokens", {"messages": HI}).json())


def test_token_counts_of_messages_that_are_cleared_or_bring_tools_and_documents() -> None:
    tool = {"name": "look", "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}}}
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "a text of some length"}}
    found = {"type": "search_result", "title": "T", "source": "u", "content": [{"type": "text", "text": "sunny"}]}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [document, found]}
    adds = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}, document]},
        {"role": "system", "content": [{"type": "text", "text": "be brief"}, adds], "clear_at": "next_user_message"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    server = LiveServer(tool_caller())
    server.info = changed(INFO, max_model_len=4096)
    with server:
        counted = server.post(f"{PATH}/count_tokens", {"messages": messages}).json()
        answered = server.post(PATH, BODY | {"messages": messages}).json()
        prompt = server.engine.requests[0].prompt.ids
    assert counted["input_tokens"] == answered["usage"]["input_tokens"] == len(prompt)


def test_what_the_documents_say(server: LiveServer) -> None:
    Message.model_validate(server.post(PATH, BODY | {"mood": 1, "slo": {"report": True, "ttft_ms": 1e6}}).json())


def test_objectives_are_reported_and_classes_found(server: LiveServer) -> None:
    answer = server.post(PATH, BODY | {"slo": {"report": True}, "mood": 1}, headers={"x-slo-ttft-ms": "60000"}).json()
    assert answer["usage"]["slo"]["met"] is True and answer["warnings"] == ["mood"]
    assert server.engine.requests[0].prompt.meta.slo is not None


def test_a_call_that_is_nested_too_deep_ends_its_request_alone(server: LiveServer) -> None:
    deep = json.loads('{"a":' * 900 + "1" + "}" * 900)
    call = {"type": "tool_use", "id": "t", "name": "f", "input": deep}
    answer = server.post(PATH, BODY | {"messages": [*HI, {"role": "assistant", "content": [call]}, *HI]})
    assert (answer.status_code, answer.json()["error"]["details"]["param"]) == (400, "messages")


# --- errors -----------------------------------------------------------------------------------------------------


def test_wrong_fields(claude: anthropic.Anthropic) -> None:
    for fields, code, param in (
        ({"max_tokens": 0}, None, "max_tokens"),
        ({"stop_sequences": [""]}, None, "stop_sequences"),
        ({"extra_body": {"temperature": 3.0}}, None, "temperature"),
        ({"extra_body": {"container": "c"}}, "unsupported_field", "container"),
    ):
        with pytest.raises(anthropic.BadRequestError) as raised:
            claude.messages.create(**BODY | fields)
        error = raised.value
        assert (error.type, error.error_code) == ("invalid_request_error", code), fields
        body: Any = error.body
        assert body["error"]["details"]["param"] == param and param in error.message
        MessageErrorBody.model_validate(body)


@pytest.mark.parametrize(("text", "exact"), [("hello " * 100, True), ("x" * 100_000, False)])
def test_a_prompt_that_is_too_long_says_by_how_much(server: LiveServer, text: str, exact: bool) -> None:
    """A text that no tokenisation could fit is not tokenised: its number is a lower bound."""
    answer = server.post(PATH, BODY | {"messages": [{"role": "user", "content": text}]})
    error = answer.json()["error"]
    tokens = int(error["message"].removeprefix("prompt is too long: ").removesuffix(" tokens > 63 maximum"))
    real = len(server.tokenizer.encode(f"<|endoftext|><|user|>{text}<|end|><|assistant|>", add_special_tokens=False))
    assert tokens == real if exact else 1000 < tokens <= real
    assert error["details"] == {"error_code": "context_length_exceeded", "param": "messages", "retryable": False}


@pytest.mark.parametrize("tokens", [64, 32_000])
def test_lengths_beyond_the_context_are_clipped(server: LiveServer, tokens: int) -> None:
    assert server.post(PATH, BODY | {"max_tokens": tokens}).status_code == 200
    request = server.engine.requests[0]
    assert request.prompt.params.max_tokens == 64 - len(request.prompt.ids)


EDITS = {"edits": [{"type": "clear_tool_uses_20250919"}]}


@pytest.mark.parametrize(
    ("asked", "warnings"),
    [
        ({"edits": []}, None),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, None),
        ({"edits": [{"type": "clear_thinking_20251015"}]}, ["context_management"]),
        (EDITS, ["context_management"]),
        ({"edits": 5}, ["context_management"]),
    ],
)
def test_no_edit_is_applied(server: LiveServer, asked: Any, warnings: list[str] | None) -> None:
    answer = server.post(PATH, BODY | {"context_management": asked}).json()
    assert answer["context_management"] == {"applied_edits": []} and answer.get("warnings") == warnings
    Message.model_validate(answer)


def test_a_stream_says_that_no_edit_is_applied(claude: anthropic.Anthropic) -> None:
    edits: Any = EDITS
    with claude.beta.messages.stream(**BODY, context_management=edits) as stream:
        final = stream.get_final_message()
    assert final.context_management is not None and final.context_management.applied_edits == []
    assert claude.beta.messages.create(**BODY).context_management is None


BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch=1;"}
BE_BRIEF = {"type": "text", "text": "be brief"}


def test_who_pays_is_no_part_of_the_prompt(claude: anthropic.Anthropic, server: LiveServer) -> None:
    cached = BILLING | {"cache_control": {"type": "ephemeral"}}
    for system in ([cached, BE_BRIEF], [BE_BRIEF]):
        claude.messages.create(**BODY, system=system)
    billed, plain = (request.prompt.ids for request in server.engine.requests)
    assert billed == plain

    def counted(*system: dict[str, Any]) -> int:
        return claude.messages.count_tokens(model="fake", messages=HI, system=list(system)).input_tokens  # type: ignore[arg-type]

    assert counted(cached, BE_BRIEF) == counted(BE_BRIEF) == len(plain)
    assert counted(cached) == claude.messages.count_tokens(model="fake", messages=HI).input_tokens  # type: ignore[arg-type]
    for other in (BE_BRIEF, BILLING), (BILLING | {"text": f"{BILLING['text']}\nbe brief"},):
        assert counted(*other) > len(plain)


def test_errors_of_every_status(serve: Serve) -> None:
    server = serve(api_key=("key",), max_body_bytes=1000)
    with made(server, api_key="key") as client:
        for wrong, kind, status, type in (
            ({"model": "other"}, anthropic.NotFoundError, 404, "not_found_error"),
            (
                {"messages": [{"role": "user", "content": "x" * 2000}]},
                anthropic.APIStatusError,
                413,
                "request_too_large",
            ),
        ):
            with pytest.raises(kind) as raised:
                client.messages.create(**BODY | wrong)
            assert (raised.value.status_code, raised.value.type) == (status, type)
            assert raised.value.request_id == raised.value.response.headers["x-request-id"]
    with made(server) as stranger, pytest.raises(anthropic.AuthenticationError) as refused:
        stranger.messages.create(**BODY)
    assert (refused.value.type, refused.value.error_code) == ("authentication_error", "invalid_api_key")
    keyed = {"x-api-key": "key"}
    assert server.post(PATH, BODY, headers=keyed).status_code == 200
    for path, status, kind in (
        (f"{PATH}/batches", 404, "not_found_error"),
        (f"{PATH}/count_tokens", 400, "invalid_request_error"),
    ):
        answer = server.post(path, {}, headers=keyed)
        MessageErrorBody.model_validate(answer.json())
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    wrong_method = server.get(PATH, headers=keyed)
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    MessageErrorBody.model_validate(wrong_method.json())
    bad_id = server.post(PATH, BODY, headers=keyed | {"X-Request-Id": "a b"})
    assert bad_id.status_code == 400 and bad_id.json()["type"] == "error"
    assert "type" not in server.post("/v1/messagesx", BODY, headers=keyed).json(), "which is another path"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_reasons(server: LiveServer, claude: anthropic.Anthropic, stream: bool) -> None:
    server.engine.script = lambda request: [rejected()]
    with pytest.raises(anthropic.RateLimitError) as raised:
        claude.messages.create(**BODY, stream=stream, extra_body={"slo": {"ttft_ms": 100}})
    assert (raised.value.type, raised.value.error_code) == ("rate_limit_error", "slo_unattainable")
    body: Any = raised.value.body
    MessageErrorBody.model_validate(body)
    details = body["error"]["details"]
    assert (details["reason"], details["cause"], details["predicted_ttft_ms"]) == ("ttft", "price", 2500)
    assert raised.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize("stream", [False, True])
def test_failures_of_the_engine(server: LiveServer, claude: anthropic.Anthropic, stream: bool) -> None:
    server.engine.script = dead
    with pytest.raises(anthropic.InternalServerError) as raised:
        claude.messages.create(**BODY, stream=stream)
    assert (raised.value.status_code, raised.value.type, raised.value.error_code) == (500, "api_error", "engine_dead")
    body: Any = raised.value.body
    MessageErrorBody.model_validate(body)
    assert body["error"]["details"]["retryable"] and "x-should-retry" not in raised.value.response.headers
    server.engine.script = lambda request: [timed_out()]
    with pytest.raises(anthropic.APIStatusError) as late:
        claude.messages.create(**BODY, stream=stream, extra_body={"timeout_s": 5.0})
    assert (late.value.status_code, late.value.type) == (504, "timeout_error")


def test_a_failure_on_the_way_is_an_error_of_the_client(server: LiveServer, claude: anthropic.Anthropic) -> None:
    first = server.engine.default_script
    server.engine.script = lambda request: [first(request)[0], Wait(), EngineDeadError("gone")]
    with claude.messages.stream(**BODY) as stream, pytest.raises(anthropic.APIStatusError) as raised:
        assert next(stream).type == "message_start"
        server.call(server.engine.release)
        list(stream)
    assert raised.value.error_code == "engine_dead"
    body: Any = raised.value.body
    assert body["error"]["details"]["retryable"], "a client may choose to ask anew"


@pytest.mark.parametrize(
    ("fields", "status", "type"),
    [({"code": "draining"}, 503, "overloaded_error"), ({"code": "too_many_inflight"}, 429, "rate_limit_error")],
)
def test_a_server_that_takes_nothing(server: LiveServer, fields: dict[str, str], status: int, type: str) -> None:
    server.engine.refuse = ApiError(status, "No", type="overloaded_error", retry_after_s=2.0, **fields)
    answer = server.post(PATH, BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, type)
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["details"]["error_code"] == fields["code"]


# --- the life of a request --------------------------------------------------------------------------------------


def test_pings_while_nothing_happens(serve: Serve) -> None:
    server = serve(sse_keep_alive_interval=0.02)
    first = server.engine.default_script
    server.engine.script = lambda request: [Wait(), *first(request)]
    with server.connect() as connection:
        connection.sendall(http_post(PATH, BODY | {"stream": True}, "connection: close"))
        got = b""
        while b"event: ping" not in got:
            got += connection.recv(65536)
        server.call(server.engine.release)
        got += read_all(connection)
    body = b"".join(part for i, part in enumerate(got.partition(b"\r\n\r\n")[2].split(b"\r\n")) if i % 2)
    names = [name for name, _ in parsed(body)]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"
    assert names.count("message_start") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_work_with_it(server: LiveServer, stream: bool) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [script(request)[0], Wait()]
    with server.connect() as connection:
        connection.sendall(http_post(PATH, BODY | {"stream": stream}))
        server.until(lambda: len(server.engine.live) == 1)
        if stream:
            assert connection.recv(1024)
    server.until(lambda: len(server.engine.cancelled) == 1)
