"""Outputs as OpenAI's Responses API writes them: golden events, whole responses, and that both say the same."""

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from roseinfer.core.outputs import FinishReason
from roseinfer.server.formats.responses.custom_tools import CUSTOM, custom_input
from roseinfer.server.formats.responses.format import ResponsesFormat
from roseinfer.server.formats.responses.tool_kinds import CallName
from roseinfer.server.http.errors import engine_failed
from roseinfer.server.request.job import StreamChoices, Usage
from roseinfer.text.output import Event, Reasoning, Text
from tests.server.formats.played import BUSY, TOKENIZER, Events, call, chunks, job_of, parsed, streamed, whole

FORMAT = ResponsesFormat()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ABOUT = {
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "temperature": 1.0,
    "top_p": 1.0,
}


def reasoning(status: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_r_0", "status": status, "summary": [], "content": content}


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message(index: int, status: str, *texts: str) -> dict[str, Any]:
    content = [part(text) for text in texts]
    item = {"type": "message", "id": f"msg_r_{index}", "status": status, "role": "assistant"}
    return item | {"content": content}


def function_call(index: int, status: str, name: str, arguments: str) -> dict[str, Any]:
    number = index - 2
    said = {"call_id": f"call_{number}", "name": name, "arguments": arguments}
    return {"type": "function_call", "id": f"fc_r_{index}", "status": status, **said}


def numbered(events: Events) -> list[dict[str, Any]]:
    """The data, without the numbers, which have no gaps."""
    assert [data.pop("sequence_number") for _, data in events] == list(range(len(events)))
    return [data for _, data in events]


def test_the_events_of_a_stream() -> None:
    created, started, *events, completed = numbered(streamed(FORMAT, chunks(BUSY), about=ABOUT))
    assert created == started | {"type": "response.created"} and started["type"] == "response.in_progress"
    assert started["response"]["status"] == "in_progress" and started["response"]["output"] == []
    thought, text = {"item_id": "rs_r_0", "output_index": 0}, {"item_id": "msg_r_1", "output_index": 1}
    look, wait = {"item_id": "fc_r_2", "output_index": 2}, {"item_id": "fc_r_3", "output_index": 3}
    at = {"content_index": 0}

    def event(name: str, /, *fields: dict[str, Any], **more: Any) -> dict[str, Any]:
        merged = {"type": f"response.{name}"} | more
        for each in fields:
            merged |= each
        return merged

    def item(what: str, index: int, value: dict[str, Any]) -> dict[str, Any]:
        return event(f"output_item.{what}", output_index=index, item=value)

    items = [
        reasoning("completed", "Hm, so."),
        message(1, "completed", "\n\nLet me see.\n"),
        function_call(2, "completed", "look", '{"at": "x"}'),
        function_call(3, "completed", "wait", ""),
    ]
    assert events == [
        item("added", 0, reasoning("in_progress")),
        event("reasoning_text.delta", thought, at, delta="Hm, "),
        event("reasoning_text.delta", thought, at, delta="so."),
        event("reasoning_text.done", thought, at, text="Hm, so."),
        item("done", 0, items[0]),
        item("added", 1, message(1, "in_progress")),
        event("content_part.added", text, at, part=part("")),
        event("output_text.delta", text, at, delta="\n\nLet me", logprobs=[]),
        event("output_text.delta", text, at, delta=" see.\n", logprobs=[]),
        event("output_text.done", text, at, text="\n\nLet me see.\n", logprobs=[]),
        event("content_part.done", text, at, part=part("\n\nLet me see.\n")),
        item("done", 1, items[1]),
        item("added", 2, function_call(2, "in_progress", "look", "")),
        event("function_call_arguments.delta", look, delta='{"at":'),
        event("function_call_arguments.delta", look, delta=' "x"}'),
        event("function_call_arguments.done", look, arguments='{"at": "x"}', name="look"),
        item("done", 2, items[2]),
        item("added", 3, function_call(3, "in_progress", "wait", "")),
        event("function_call_arguments.done", wait, arguments="", name="wait"),
        item("done", 3, items[3]),
    ]
    assert completed["type"] == "response.completed"
    assert completed["response"]["output"] == items and completed["response"]["id"] == created["response"]["id"]


CASES: list[tuple[list[Event], FinishReason, str, str | None]] = [
    (BUSY, FinishReason.STOP, "completed", None),
    ([Text("Hi")], FinishReason.STOP, "completed", None),
    ([Reasoning("Hi")], FinishReason.LENGTH, "incomplete", "max_output_tokens"),
    (call(0, "f", '{"a', complete=False), FinishReason.LENGTH, "incomplete", "max_output_tokens"),
    ([Text("Hi")], FinishReason.TIMEOUT, "incomplete", "timeout"),
    ([], FinishReason.STOP, "completed", None),
]


@pytest.mark.parametrize(("events", "finish", "status", "reason"), CASES)
def test_a_stream_and_a_whole_response_say_the_same(
    events: list[Event], finish: FinishReason, status: str, reason: str | None
) -> None:
    given = chunks(events, finish)
    response = whole(FORMAT, given, about=ABOUT)
    sent = streamed(FORMAT, given, about=ABOUT)
    for _, data in sent:
        if reason != "timeout":  # which is none of theirs
            EVENT.validate_python(data)
    name, last = sent[-1]
    response["completed_at"] = last["response"]["completed_at"]
    assert last["response"] == response
    assert (name, response["status"]) == (f"response.{status}", status)
    assert response["incomplete_details"] == (None if reason is None else {"reason": reason})
    if reason != "timeout":
        Response.model_validate(response)
    if response["output"]:
        assert response["output"][-1]["status"] == status


def test_usage() -> None:
    response = whole(FORMAT, chunks([Text("Hi")]))
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 16,
    }


def test_a_failure_says_what_there_was() -> None:
    events = streamed(FORMAT, chunks([Reasoning("a"), Text("Hi")])[:2], engine_failed(None), about=ABOUT)
    *_, last = numbered(events)
    assert last["type"] == "response.failed"
    response = last["response"]
    assert response["status"] == "failed"
    message_text = "The engine failed while this request ran"
    assert response["error"] == {"code": "engine_dead", "message": message_text, "retryable": True}
    assert response["output"] == [reasoning("completed", "a"), message(1, "incomplete", "Hi")]


def test_an_idle_stream_begins_and_then_comments() -> None:
    encoder = FORMAT.events(job_of(StreamChoices()), TOKENIZER, lambda: Usage(7, 0, 0))
    first = encoder.idle()
    comment = b": keep-alive\n\n"
    assert first.endswith(comment) and encoder.idle() == comment == encoder.filler
    assert [name for name, _ in parsed(first.removesuffix(comment))] == ["response.created", "response.in_progress"]


def test_warnings_are_part_of_the_response() -> None:
    assert whole(FORMAT, chunks([]), warnings=("mood",))["warnings"] == ["mood"]


# --- tools with names of their own --------------------------------------------------------------------------------
CALL_NAMES = {"agents.send": CallName("send", "agents"), "patch": CallName("patch", kind=CUSTOM)}
CUSTOM = [*call(0, "patch", '{"input": "a', "\\n", 'b"}'), *call(1, "agents.send", "{}"), *call(2, "gone", "{}")]


def test_calls_have_the_names_that_the_client_gave() -> None:
    head: dict[str, Any] = {"status": "completed"}
    expected = [
        {"type": "custom_tool_call", "id": "ctc_r_0", "call_id": "call_0", "name": "patch", "input": "a\nb"} | head,
        {"type": "function_call", "id": "fc_r_1", "call_id": "call_1", "name": "send", "namespace": "agents"}
        | {"arguments": "{}"}
        | head,
        {"type": "function_call", "id": "fc_r_2", "call_id": "call_2", "name": "gone", "arguments": "{}"} | head,
    ]
    assert whole(FORMAT, chunks(CUSTOM), about=ABOUT, call_names=CALL_NAMES)["output"] == expected
    events = streamed(FORMAT, chunks(CUSTOM), about=ABOUT, call_names=CALL_NAMES)
    assert events[-1][1]["response"]["output"] == expected
    assert [data["item"] for name, data in events if name == "response.output_item.done"] == expected
    for _, data in events:
        EVENT.validate_python(data)


def test_the_input_of_a_custom_tool_is_sent_when_it_is_complete() -> None:
    events = numbered(streamed(FORMAT, chunks(CUSTOM[:5]), about=ABOUT, call_names=CALL_NAMES))
    place = {"item_id": "ctc_r_0", "output_index": 0}
    added, delta, done = events[2:5]
    assert added["item"]["input"] == ""
    assert delta == {"type": "response.custom_tool_call_input.delta", "delta": "a\nb"} | place
    assert done == {"type": "response.custom_tool_call_input.done", "input": "a\nb"} | place


@pytest.mark.parametrize(
    ("arguments", "given"),
    [('{"input": "a\\u00e9', "aé"), ('{"inp', ""), ("", ""), ("no JSON", "no JSON"), ('{"input": 5}', '{"input": 5}')],
)
def test_the_input_in_arguments_that_are_not_whole(arguments: str, given: str) -> None:
    assert custom_input(arguments) == given
