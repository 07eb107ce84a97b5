"""Outputs as Anthropic's API writes them: golden events, whole messages, and that both say the same."""

import json
from typing import Any

import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from roseinfer.core.outputs import FinishReason
from roseinfer.server.formats.messages import document
from roseinfer.server.formats.messages.format import MessagesFormat
from roseinfer.server.http.errors import engine_failed
from roseinfer.server.request.job import StreamChoices, Usage
from roseinfer.text.output import Event, Reasoning, Text
from tests.server.formats.played import BUSY, TOKENIZER, USAGE, Events, call, chunks, job_of, parsed, streamed, whole

FORMAT = MessagesFormat()
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def delta(index: int, kind: str, **fields: str) -> tuple[str, dict[str, Any]]:
    return block("delta", index, delta={"type": f"{kind}_delta", **fields})


def block(what: str, index: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    return f"content_block_{what}", {"type": f"content_block_{what}", "index": index, **fields}


USED = {
    "input_tokens": 5,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 2,
    "output_tokens": 9,
    "output_tokens_details": {"thinking_tokens": 4},
}


def test_the_events_of_a_stream() -> None:
    message = {
        "id": "the-id", "type": "message", "role": "assistant", "model": "m", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": USED,
    }  # fmt: skip
    assert streamed(FORMAT, chunks(BUSY)) == [
        ("message_start", {"type": "message_start", "message": message}),
        block("start", 0, content_block={"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, "thinking", thinking="Hm, "),
        delta(0, "thinking", thinking="so."),
        delta(0, "signature", signature=""),
        block("stop", 0),
        block("start", 1, content_block={"type": "text", "text": ""}),
        delta(1, "text", text="\n\nLet me"),
        delta(1, "text", text=" see.\n"),
        block("stop", 1),
        block("start", 2, content_block={"type": "tool_use", "id": "call_0", "name": "look", "input": {}}),
        delta(2, "input_json", partial_json='{"at":'),
        delta(2, "input_json", partial_json=' "x"}'),
        block("stop", 2),
        block("start", 3, content_block={"type": "tool_use", "id": "call_1", "name": "wait", "input": {}}),
        block("stop", 3),
        (
            "message_delta",
            {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": USED},
        ),
        ("message_stop", {"type": "message_stop"}),
    ]


def test_a_whole_message() -> None:
    assert whole(FORMAT, chunks(BUSY)) == {
        "id": "the-id",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm, so.", "signature": ""},
            {"type": "text", "text": "\n\nLet me see.\n"},
            {"type": "tool_use", "id": "call_0", "name": "look", "input": {"at": "x"}},
            {"type": "tool_use", "id": "call_1", "name": "wait", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": USED,
    }


def folded(events: Events) -> dict[str, Any]:
    """Assemble a message as the client does."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for _, data in events:
        event = EVENT.validate_python(data)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return json.loads(snapshot.to_json())


CASES: list[tuple[list[Event], FinishReason, int | str | None, tuple[str, str | None]]] = [
    (BUSY, FinishReason.STOP, None, ("tool_use", None)),
    ([Text("Hi")], FinishReason.STOP, None, ("end_turn", None)),
    ([Text("Hi")], FinishReason.STOP, 13, ("end_turn", None)),
    ([Text("Hi")], FinishReason.STOP, "\n\n", ("stop_sequence", "\n\n")),
    ([Reasoning("Hi")], FinishReason.LENGTH, None, ("max_tokens", None)),
    ([Text("Hi")], FinishReason.TIMEOUT, None, ("timeout", None)),
    (call(0, "f", '{"a": [1, 2', complete=False), FinishReason.LENGTH, None, ("max_tokens", None)),
    (call(0, "f", '{"a": "b", "c": "d', complete=False), FinishReason.LENGTH, None, ("max_tokens", None)),
    (call(0, "f", "{", complete=False), FinishReason.STOP, None, ("end_turn", None)),
    (call(0, "f", "{}"), FinishReason.STOP, "x", ("stop_sequence", "x")),
    ([], FinishReason.STOP, None, ("end_turn", None)),
]


@pytest.mark.parametrize(("events", "finish", "stop_reason", "reason"), CASES)
def test_a_stream_and_a_whole_message_say_the_same(
    events: list[Event], finish: FinishReason, stop_reason: int | str | None, reason: tuple[str, str | None]
) -> None:
    given = chunks(events, finish, stop_reason)
    message = whole(FORMAT, given)
    document.Message.model_validate(message)
    Message.model_validate(message | {"stop_reason": None})  # they have no timeout
    assert (message["stop_reason"], message["stop_sequence"]) == reason
    if reason[0] != "timeout":
        there = folded(streamed(FORMAT, given))
        assert {name: there[name] for name in message} == message


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"n": 123456789012345678901234567890, "x": 1.0}', b'{"n": 123456789012345678901234567890, "x": 1.0}'),
        ('{"a": NaN}', b"{}"),
        ("[1]", b"{}"),
        ("", b"{}"),
        ("{" + '"a": {' * 500, b"{}"),
        ('{"n": 123456789012345678901234567890, "x', b'{"n": 123456789012345678901234567890}'),
    ],
)
def test_arguments_are_the_models_own_words_as_far_as_they_are_an_object(arguments: str, shown: bytes) -> None:
    body = FORMAT.whole(job_of(), TOKENIZER)
    for chunk in chunks(call(0, "f", arguments, complete=False)):
        body.add(0, chunk)
    assert b'"input":' + shown in orjson.dumps(body.body(USAGE))


def test_a_failure_is_an_event_after_which_nothing_comes() -> None:
    events = streamed(FORMAT, chunks([Text("Hi")])[:1], engine_failed(2.5))
    assert [name for name, _ in events] == [
        "message_start", "content_block_start", "content_block_delta", "error",
    ]  # fmt: skip
    assert events[-1][1]["error"] == {
        "type": "api_error",
        "message": "The engine failed while this request ran",
        "details": {"error_code": "engine_dead", "retryable": True, "retry_after_s": 3},
    }


def test_an_idle_stream_begins_and_says_ping() -> None:
    encoder = FORMAT.events(job_of(StreamChoices()), TOKENIZER, lambda: Usage(7, 0, 0))
    assert [name for name, _ in parsed(encoder.idle())] == ["message_start", "ping"]
    assert [name for name, _ in parsed(encoder.idle())] == ["ping"]
    assert encoder.add(0, chunks([Text("Hi")])[0])
    assert parsed(encoder.encode(encoder.take()))[0][0] == "content_block_start"


def test_objectives_and_warnings() -> None:
    usage = Usage(7, 9, 2, None, {"ttft_ms": 1.5, "tpot_ms": 2.5, "met": True})
    body = FORMAT.whole(job_of(warnings=("mood",)), TOKENIZER)
    for chunk in chunks([Text("Hi")]):
        body.add(0, chunk)
    message = body.body(usage)
    document.Message.model_validate(message)
    assert message["warnings"] == ["mood"] and message["usage"]["slo"] == usage.slo
    assert "output_tokens_details" not in message["usage"]
    first = streamed(FORMAT, chunks([]), warnings=("mood",))[0][1]
    assert first["message"]["warnings"] == ["mood"]
