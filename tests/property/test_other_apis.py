"""Responses and Messages over random outputs and random bodies."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.outputs import FinishReason
from roseinfer.server.formats import chat_builder
from roseinfer.server.formats.messages import request as messages
from roseinfer.server.formats.messages.format import MessagesFormat
from roseinfer.server.formats.responses import request as responses
from roseinfer.server.formats.responses.client_tools import CLIENT_TOOLS
from roseinfer.server.formats.responses.format import ResponsesFormat
from roseinfer.server.formats.responses.tool_kinds import CallName
from roseinfer.server.http.errors import ApiError
from roseinfer.server.http.request_models import parse
from roseinfer.text.output import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from tests.helpers.cases import examples
from tests.server.formats.played import Events, chunks, streamed, whole

TEXTS = st.text("ab \n{", max_size=4)
ARGUMENTS = st.dictionaries(st.text("kl", max_size=2), TEXTS, max_size=2) | st.fixed_dictionaries(
    {"commands": st.lists(TEXTS, min_size=1, max_size=2)}
)
CALL_NAMES = st.sampled_from([{}, {"f": CallName("shell", kind=CLIENT_TOOLS[0])}])
ENDS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


@st.composite
def outputs(draw: st.DrawFn) -> list[Event]:
    """Draw outputs like those of parsers: calls one after the other, each with its end."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call"]), max_size=8)):
        if kind == "call":
            written = json.dumps(draw(ARGUMENTS))
            kept = written[: draw(st.integers(0, len(written)))]
            cut = draw(st.integers(0, len(kept)))
            parts = [CallArguments(calls, part) for part in (kept[:cut], kept[cut:])]
            events += [CallStart(calls, f"call_{calls}", "f"), *parts, CallEnd(calls, kept == written)]
            calls += 1
        else:
            events.append((Reasoning if kind == "reasoning" else Text)(draw(TEXTS)))
    return events


@examples(60)
@given(events=outputs(), finish=ENDS)
def test_a_stream_of_blocks_is_the_message_in_pieces(events: list[Event], finish: FinishReason) -> None:
    given_chunks = chunks(events, finish)
    message = whole(MessagesFormat(), given_chunks)
    blocks: list[dict[str, Any]] = []
    open_index = None
    for name, data in streamed(MessagesFormat(), given_chunks):
        if name == "content_block_start":
            assert open_index is None and data["index"] == len(blocks)
            open_index = data["index"]
            blocks.append({**data["content_block"], "said": ""})
        elif name == "content_block_delta":
            assert data["index"] == open_index
            blocks[-1]["said"] += next((v for k, v in data["delta"].items() if k not in ("type", "signature")), "")
        elif name == "content_block_stop":
            assert data["index"] == open_index
            open_index = None
    assert open_index is None and len(blocks) == len(message["content"])
    for there, here in zip(blocks, message["content"], strict=True):
        assert there["type"] == here["type"]
        if here["type"] == "tool_use":
            complete = parsed(there["said"])
            assert complete is None or complete == here["input"]
        else:
            assert there["said"] == here["text" if here["type"] == "text" else "thinking"] != ""
    kinds = [block["type"] for block in blocks]
    for first, second in pairwise(blocks):
        assert not (first["type"] == "text" and first["said"].isspace() and second["type"] == "tool_use")
    assert (message["stop_reason"] == "end_turn") <= (
        "tool_use" not in kinds or not any(type(event) is CallEnd and event.complete for event in events)
    )


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@examples(60)
@given(events=outputs(), finish=ENDS, call_names=CALL_NAMES)
def test_the_items_of_a_stream_are_those_of_the_response(
    events: list[Event], finish: FinishReason, call_names: dict[str, CallName]
) -> None:
    given_chunks = chunks(events, finish)
    sent: Events = streamed(ResponsesFormat(), given_chunks, call_names=call_names)
    assert [data["sequence_number"] for _, data in sent] == list(range(len(sent)))
    final = sent[-1][1]["response"]
    done = [data["item"] for name, data in sent if name == "response.output_item.done"]
    assert done == final["output"] == whole(ResponsesFormat(), given_chunks, call_names=call_names)["output"]
    added = [data["item"]["id"] for name, data in sent if name == "response.output_item.added"]
    assert added == [item["id"] for item in done] and len(set(added)) == len(added)
    said = dict.fromkeys(added, "")
    for name, data in sent:
        if name.endswith(".delta"):
            said[data["item_id"]] += data["delta"]
    for item in done:
        assert said[item["id"]] == text_of(item)


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "shell_call":
        return "".join(item["action"]["commands"])
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


# --- bodies -----------------------------------------------------------------------------------------------------
FIELD_NAMES = st.sampled_from(
    [
        "message", "user", "assistant", "system", "text", "input_text", "output_text", "function_call", "tool_use",
        "function_call_output", "tool_result", "thinking", "reasoning", "function", "custom", "auto", "any", "tool",
        "namespace", "custom_tool_call", "web_search_call", "mcp_call", "additional_tools", "item_reference",
        "allowed_tools", "json_schema", "enabled", "disabled", "f", "shell", "shell_call", "local_shell",
        "local_shell_call_output", "apply_patch", "apply_patch_call", "apply_patch_call_output", "local", "failed",
    ]
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "type", "role", "content", "text", "name", "id", "call_id", "arguments", "output", "summary", "input", "tools",
        "thinking", "tool_use_id", "mode", "parameters", "input_schema", "schema", "format", "budget_tokens", "effort",
        "encrypted_content", "strict", "namespace", "edits", "defer_loading", "environment", "skills", "action",
        "operation", "commands", "status",
    ]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2000) | FIELD_NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@examples(150)
@given(
    body=st.dictionaries(
        st.sampled_from(
            [
                "input", "instructions", "tools", "tool_choice", "text", "reasoning", "metadata", "include",
                "max_output_tokens", "stop", "background", "prompt", "n", "mood", "temperature",
            ]
        ),
        VALUES,
    )
)  # fmt: skip
def test_any_body_is_a_chat_or_a_wrong_response(body: dict[str, Any]) -> None:
    try:
        request = parse(responses.ResponsesRequest, {"input": "x"} | body)
        responses.ResponsesTranslation(request)
    except ApiError as error:
        assert error.status == 400 and error.param


@examples(150)
@given(
    body=st.dictionaries(
        st.sampled_from(
            [
                "messages", "system", "tools", "tool_choice", "thinking", "output_config", "max_tokens", "metadata",
                "stop_sequences", "container", "n", "mood", "cache_control", "temperature",
            ]
        ),
        VALUES,
    )
)  # fmt: skip
def test_any_body_is_a_chat_or_a_wrong_message(body: dict[str, Any]) -> None:
    given_body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5} | body
    try:
        request = parse(messages.MessagesRequest, given_body)
        messages.MessagesTranslation(request)
    except ApiError as error:
        assert error.status == 400 and error.param


@examples(60)
@given(pieces=st.lists(st.sampled_from(["user", "answer", "think", "call", "result"]), max_size=8))
def test_pieces_of_a_conversation_keep_their_order(pieces: list[str]) -> None:
    """In any grouping into messages."""
    chat = chat_builder.ChatBuilder()
    for i, piece in enumerate(pieces):
        if piece == "user":
            chat.add_text("user", [str(i)])
        elif piece == "answer":
            chat.add_answer([str(i)])
        elif piece == "think":
            chat.add_reasoning(str(i))
        elif piece == "call":
            chat.add_call("c", str(i), "{}")
        else:
            chat.add_result("c", [str(i)])
    found: list[str] = []
    for message in chat.messages():
        content = message["content"] or []
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
        found += [*message.get("reasoning_content", ""), *texts, *calls]
    assert found == [str(i) for i in range(len(pieces))]
