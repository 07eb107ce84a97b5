"""Bodies of /v1/responses as chats."""

import json
from typing import Any

import pytest

from roseinfer.server.formats.responses.request import ResponsesRequest, as_chat, ignored_parts
from roseinfer.server.formats.schemas import parse
from roseinfer.server.http.errors import ApiError

TOOL = {"type": "function", "name": "look", "description": "Look", "parameters": {"type": "object"}, "strict": True}
DEEP = json.loads("[" * 300 + "]" * 300)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def chat(**fields: Any) -> dict[str, Any]:
    """The fields of the chat."""
    return as_chat(parse(ResponsesRequest, {"input": "x"} | fields)).model_dump(exclude_none=True, by_alias=True)


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat(input=list(items), **fields)["messages"]


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        chat(**fields)
    assert raised.value.status == 400
    return raised.value


def test_a_text_is_what_the_user_says() -> None:
    found = chat(input="hello", instructions="be brief")
    assert found["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def user(*texts: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in texts]}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "x"}', "id": "fc_1"}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Well", "annotations": [], "logprobs": []}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}


def tool_call(call_id: str = "c1", arguments: str = '{"at": "x"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_messages_of_all_roles() -> None:
    assert messages(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hello"},
        user("one", "two"),
        SAID,
        {"role": "assistant", "content": "then"},
        {"role": "system", "content": "now"},
    ) == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts("hello", "one", "two")},
        {"role": "assistant", "content": parts("Well", "then")},
        {"role": "system", "content": "now"},
    ]


def test_a_turn_with_reasoning_text_and_calls_is_one_message() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    several = output | {"output": [{"type": "input_text", "text": "sunny"}, {"type": "input_text", "text": "warm"}]}
    assert messages(user("hello"), THOUGHT, SAID, CALL, CALL | {"call_id": "c2"}, output, several, THOUGHT, SAID) == [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "reasoning_content": "Hm",
            "content": "Well",
            "tool_calls": [tool_call(), tool_call("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c1", "content": parts("sunny", "warm")},
        {"role": "assistant", "reasoning_content": "Hm", "content": "Well"},
    ]


def test_what_does_not_fit_into_a_message_begins_the_next() -> None:
    assert messages(CALL, SAID, THOUGHT) == [
        {"role": "assistant", "tool_calls": [tool_call()]},
        {"role": "assistant", "content": "Well"},
        {"role": "assistant", "reasoning_content": "Hm", "content": ""},
    ]


def test_a_summary_stands_in_for_reasoning_that_is_not_there() -> None:
    summary = [{"type": "summary_text", "text": "Hm"}, {"type": "summary_text", "text": "so"}]
    assert messages({"type": "reasoning", "summary": summary}, SAID)[0]["reasoning_content"] == "Hm\nso"
    assert "reasoning_content" not in messages({"type": "reasoning", "summary": []}, SAID)[0]


CONTENT = "unsupported_content"


@pytest.mark.parametrize(
    ("item", "place", "code"),
    [
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input.0.content.0", CONTENT),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input.0.content.0", CONTENT),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.0.content.0.text", None),
        ({"role": "user", "content": 5}, "input.0.content", None),
        ({"role": "user"}, "input.0.content", None),
        ({"content": "x"}, "input.0.role", None),
        ({"role": "tool", "content": "x"}, "input.0.role", None),
        ({"type": "item_reference", "id": "msg_1"}, "input.0", "unsupported_field"),
        ({"type": "web_search_call", "id": "x"}, "input.0", "unsupported_field"),
        ({"type": "reasoning", "encrypted_content": "abc"}, "input.0.encrypted_content", "unsupported_field"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input.0.arguments", None),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input.0.call_id", None),
        ({"type": "function_call_output", "output": "x"}, "input.0.call_id", None),
        ({"type": "function_call_output", "call_id": "c"}, "input.0.output", None),
        ({"type": ["message"]}, "input.0", "unsupported_field"),
    ],
)  # fmt: skip
def test_items_that_cannot_be_taken(item: dict[str, Any], place: str, code: str | None) -> None:
    error = refused(input=[item])
    assert (error.param, error.code) == ("input", code) and error.message.startswith(place)


def test_no_items() -> None:
    assert refused(input=[]).param == "input"


def test_tools_stand_within_their_functions_in_a_chat() -> None:
    found = chat(tools=[TOOL, {"type": "function", "name": "f", "parameters": None}], parallel_tool_calls=False)
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert found["tools"] == [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "f"}},
    ]
    assert found["parallel_tool_calls"] is False and "tool_choice" not in found
    assert "tools" not in chat(tools=[])


NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("choice", "there"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "look"}, NAMED),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        ),
    ],
)
def test_tool_choices(choice: Any, there: Any) -> None:
    assert chat(tools=[TOOL], tool_choice=choice)["tool_choice"] == there


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools"),
        ({"tools": [{"name": "x"}]}, "tools"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOL | {"allowed_callers": ["programmatic"]}]}, "tools.0.allowed_callers"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"n": 1}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == ("unsupported_field", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": "all"}, "include"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"input": 5}, "input"),
        ({"text": "json"}, "text"),
        ({"metadata": {"a": {"b": "c"}}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"tools": [TOOL | {"x": DEEP}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "look", "x": DEEP}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "x": DEEP}}}, "text.format"),
    ],
)
def test_wrong(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    ("wanted", "there"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True, "description": None},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        ),
    ],
)
def test_formats(wanted: dict[str, Any], there: dict[str, Any]) -> None:
    found = chat(text={"format": wanted, "verbosity": "medium"})
    assert found["response_format"] == there and found["verbosity"] == "medium"


def test_what_is_passed_on() -> None:
    same = {
        "stop": ["a"],
        "temperature": 0.5,
        "top_k": 3,
        "seed": 1,
        "stream": True,
        "slo": {"class": "gold", "ttft_ms": 5.0},
        "priority": -1,
        "cache_salt": "s",
        "request_id": "r",
        "user": "u",
        "mood": "good",
    }
    renamed = {"max_completion_tokens": 9, "reasoning_effort": "none"}
    assert chat(max_output_tokens=9, reasoning={"effort": "none"}, **same) == chat() | same | renamed


def test_what_asks_for_nothing_here() -> None:
    same = chat(
        store=True,
        background=False,
        truncation="disabled",
        previous_response_id=None,
        top_logprobs=0,
        metadata={"a": "b"},
        max_tool_calls=3,
        prompt_cache_key="k",
        safety_identifier="s",
        include=[],
    )
    assert same == chat()


def test_what_is_ignored_within_fields_is_named() -> None:
    request = parse(
        ResponsesRequest,
        {
            "input": "x",
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"mood": 1},
            "include": ["reasoning.encrypted_content"],
            "tools": [TOOL | {"output_schema": {}, "description": None}],
        },
    )
    assert ignored_parts(request) == [
        "text.mood",
        "reasoning.summary",
        "tools.output_schema",
        "include.reasoning.encrypted_content",
    ]
