"""Bodies of /v1/responses as chats."""

import json
from typing import Any

import pytest

from roseinfer.server.formats.responses.custom_tools import CUSTOM
from roseinfer.server.formats.responses.request import ResponsesRequest, ResponsesTranslation
from roseinfer.server.formats.responses.tool_kinds import CallName
from roseinfer.server.http.errors import ApiError
from roseinfer.server.http.request_models import parse

TOOL = {"type": "function", "name": "look", "description": "Look", "parameters": {"type": "object"}, "strict": True}
DEEP = json.loads("[" * 300 + "]" * 300)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def chat(**fields: Any) -> dict[str, Any]:
    """The fields of the chat."""
    return translated(**fields).chat.model_dump(exclude_none=True, by_alias=True)


def translated(**fields: Any) -> ResponsesTranslation:
    return ResponsesTranslation(parse(ResponsesRequest, {"input": "x"} | fields))


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


def test_items_without_content() -> None:
    error = refused(input=[{"type": "reasoning", "summary": []}])
    assert (error.param, error.message) == ("input", "input contains no text, tool calls or results")


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
        ({"type": "compaction", "encrypted_content": "abc"}, "input.0", "unsupported_field"),
        ({"type": "compaction_trigger"}, "input.0", "unsupported_field"),
        ({"type": "image_generation_call", "id": "x", "result": "abc"}, "input.0", "unsupported_field"),
        ({"type": "computer_call", "call_id": "x"}, "input.0", "unsupported_field"),
        ({"type": "unheard_of"}, "input.0", "unsupported_field"),
        ({"type": "configuration_update", "reasoning": "low"}, "input.0.reasoning", None),
        ({"type": "configuration_update", "reasoning": {"effort": 5}}, "input.0.reasoning.effort", None),
        ({"type": "configuration_update", "text": {"format": "text"}}, "input.0.text.format", None),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input.0.input", None),
        ({"type": "custom_tool_call_output", "call_id": "c"}, "input.0.output", None),
        ({"type": "shell_call_output", "call_id": "c", "output": 5}, "input.0.output", None),
        ({"type": "local_shell_call", "action": {}}, "input.0.call_id", None),
        ({"type": "shell_call_output", "call_id": "c", "output": [{"type": "image"}]}, "input.0.output", CONTENT),
        ({"type": "additional_tools", "role": "developer"}, "input.0.tools", None),
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


def test_items_change_settings_until_the_next_one() -> None:
    def update(**settings: Any) -> dict[str, Any]:
        return {"type": "configuration_update", **settings}

    format = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    low, high = update(reasoning={"effort": "low"}), update(reasoning={"effort": "high"}, text={"format": format})
    given = {"reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"}}
    found = translated(input=[user("hello"), low, SAID, high, user("and?")], **given)
    whole = found.chat.model_dump(exclude_none=True, by_alias=True)
    assert [message["role"] for message in whole["messages"]] == ["user", "assistant", "user"]
    assert whole["reasoning_effort"] == "high" and whole["verbosity"] == "low"
    assert whole["response_format"]["json_schema"] == {"name": "n", "schema": SCHEMA}
    assert found.request.reasoning is not None and found.request.reasoning.effort == "high"
    assert found.warnings == ["reasoning.summary"]
    assert "response_format" not in chat(input=[user("hello"), low])


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
        ({"tools": [{"name": "x"}]}, "tools"),
        ({"tools": [TOOL | {"allowed_callers": ["programmatic"]}]}, "tools.0.allowed_callers"),
        ({"tools": [TOOL, {"type": "file_search"}], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"n": 1}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
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
        include=[],
        context_management=[],
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert same == chat()


def test_what_is_ignored_within_fields_is_named() -> None:
    found = translated(
        reasoning={"effort": "low", "summary": "auto"},
        text={"mood": 1},
        include=["reasoning.encrypted_content"],
        stream_options={"include_usage": True, "include_obfuscation": True},
        tools=[TOOL | {"output_schema": {}, "description": None}],
    )
    assert found.warnings == [
        "text.mood",
        "reasoning.summary",
        "stream_options.include_obfuscation",
        "include.reasoning.encrypted_content",
        "tools.output_schema",
    ]


# --- tools of agents ----------------------------------------------------------------------------------------------
SEND = {"type": "function", "name": "send", "description": "Send", "parameters": {"type": "object"}}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [SEND, SEND | {"name": "wait"}],
}
PATCH = {"type": "custom", "name": "patch", "description": "Patch files."}


def functions(*tools: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [tool["function"] for tool in chat(tools=list(tools), **fields)["tools"]]


def test_functions_of_a_namespace_are_functions_of_its_name() -> None:
    send, wait, look = functions(AGENTS, TOOL)
    assert (send["name"], wait["name"], look["name"]) == ("agents.send", "agents.wait", "look")
    assert (send["description"], wait["description"]) == ("Other agents.\n\nSend", "Send")
    names = translated(tools=[AGENTS, TOOL]).call_names
    assert names["agents.send"] == CallName("send", "agents") and names["look"] == CallName("look")
    assert names["send"] == CallName("send", "agents"), "as a model may call it"
    assert translated(tools=[AGENTS, SEND]).call_names["send"] == CallName("send")
    assert "send" not in translated(tools=[AGENTS, AGENTS | {"name": "others"}]).call_names


def test_a_name_that_is_too_long_with_its_namespace_stands_alone() -> None:
    long = AGENTS | {"name": "x" * 61}
    assert [function["name"] for function in functions(long)] == ["send", "wait"]
    taken = refused(tools=[SEND, long])
    assert taken.param == "tools" and taken.message.startswith("tools.1.tools.0.name")


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ([TOOL, TOOL], "tools.1.name"),
        ([AGENTS, AGENTS], "tools.1.tools.0.name"),
        ([{"type": "web_search"}, TOOL | {"parameters": 5}], "tools.1.parameters"),
        ([AGENTS | {"tools": [SEND | {"name": ""}]}], "tools.0.tools.0.name"),
        ([AGENTS | {"tools": [{"type": "mcp"}]}], "tools.0.tools.0"),
        ([AGENTS | {"tools": None}], "tools.0.tools"),
        ([AGENTS | {"name": None}], "tools.0.name"),
        ([PATCH | {"name": None}], "tools.0.name"),
        ([PATCH | {"format": {"type": "grammar", "syntax": "lark"}}], "tools.0.format.definition"),
        ([PATCH | {"format": {"type": "sound"}}], "tools.0.format"),
        ([{"type": "x" * 20}] * 15_000, "tools have more than"),
    ],
)
def test_errors_in_tools_have_their_place(tools: list[dict[str, Any]], place: str) -> None:
    assert refused(tools=tools).message.startswith(f"{place}")


def test_tools_that_the_server_cannot_run_are_left_out() -> None:
    found = translated(tools=[{"type": "web_search", "external_web_access": False}, TOOL, {"type": "mcp"}])
    assert [tool["function"]["name"] for tool in found.chat.tools or []] == ["look"]
    assert found.warnings == ["tools.0 of type 'web_search' is left out", "tools.2 of type 'mcp' is left out"]
    assert "tools" not in chat(tools=[{"type": "web_search"}], tool_choice="auto")


def test_deferred_tools_are_shown_at_once() -> None:
    found = translated(tools=[TOOL | {"defer_loading": True, "allowed_callers": ["direct", "programmatic"]}])
    assert found.chat.tools is not None and not found.warnings


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    (function,) = functions(PATCH)
    text = {"type": "string"}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    assert function == {"name": "patch", "description": "Patch files.", "parameters": schema, "strict": True}
    assert translated(tools=[PATCH]).call_names == {"patch": CallName("patch", kind=CUSTOM)}


def test_the_grammar_of_a_custom_tool() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    (function,) = functions(PATCH | {"format": regex})
    assert function["parameters"]["properties"]["input"] == {"type": "string", "pattern": "^(?:a|b)$"}
    found = translated(tools=[PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}])
    assert found.warnings == ["tools.0.format is shown to the model, not enforced"]
    assert found.chat.tools is not None and 'start: "a"' in found.chat.tools[0]["function"]["description"]


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        (PATCH | {"description": 5}, "tools.0.description"),
        (AGENTS | {"description": {"text": "x"}}, "tools.0.description"),
        (PATCH | {"format": {"type": "grammar", "syntax": "gbnf", "definition": "a"}}, "tools.0.format.syntax"),
        (PATCH | {"format": {"type": "grammar", "definition": "a"}}, "tools.0.format.syntax"),
        (PATCH | {"format": {"type": "grammar", "syntax": "regex"}}, "tools.0.format.definition"),
    ],
)
def test_fields_of_tools_that_cannot_be_read(tool: dict[str, Any], place: str) -> None:
    error = refused(tools=[tool])
    assert (error.param, error.code) == ("tools", None) and error.message.startswith(f"{place} must be")


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "send", "namespace": "agents"}, "agents.send"),
        ({"type": "function", "name": "wait"}, "agents.wait"),
        ({"type": "function", "name": "unknown"}, "unknown"),
    ],
)
def test_choices_of_tools_by_their_names(choice: dict[str, Any], name: str) -> None:
    found = chat(tools=[AGENTS, PATCH], tool_choice=choice)
    assert found["tool_choice"] == {"type": "function", "function": {"name": name}}


def test_allowed_tools_that_cannot_be_run_are_left_out() -> None:
    allowed = [{"type": "function", "name": "look"}, {"type": "mcp", "server_label": "x"}]
    found = translated(tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    assert found.chat.tool_choice == {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    assert found.warnings == ["tool_choice.tools: those that cannot be called here are left out"]


# --- histories of other servers -------------------------------------------------------------------------------------
def calls_of(*items: dict[str, Any], **fields: Any) -> list[tuple[str, Any]]:
    found = [call["function"] for said in messages(*items, **fields) for call in said.get("tool_calls", [])]
    return [(function["name"], function["arguments"]) for function in found]


def test_calls_of_namespaces_and_custom_tools() -> None:
    send = {"type": "function_call", "call_id": "c1", "name": "send", "namespace": "agents", "arguments": "{}"}
    patch = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "a\nb"}
    done = {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}
    assert calls_of(send, patch, tools=[AGENTS, PATCH]) == [("agents.send", "{}"), ("patch", {"input": "a\nb"})]
    assert calls_of(send) == [("agents.send", "{}")], "whether or not the tool is offered now"
    assert messages(patch, done)[1] == {"role": "tool", "tool_call_id": "c2", "content": "done"}


def test_calls_of_other_servers_tools_are_shown_as_functions() -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    items: list[dict[str, Any]] = [
        {"type": "local_shell_call", "id": "x", "call_id": "c1", "action": action, "status": "completed"},
        {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "é"}]},
        {"type": "mcp_call", "id": "c3", "name": "ask", "server_label": "s", "arguments": '{"a":1}', "output": "yes"},
        {"type": "code_interpreter_call", "id": "c4", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]},
        {"type": "file_search_call", "id": "c5", "queries": ["q"], "results": None},
    ]
    assert calls_of(*items) == [
        ("local_shell", {"command": ["ls"], "env": {}}),
        ("shell", {"commands": ["ls"]}),
        ("ask", '{"a":1}'),
        ("code_interpreter", {"code": "1+1"}),
        ("file_search", {"queries": ["q"]}),
    ]
    results = [(said["tool_call_id"], said["content"]) for said in messages(*items) if said["role"] == "tool"]
    assert results == [
        ("c1", "a.txt"), ("c2", '[{"stdout":"é"}]'), ("c3", "yes"), ("c4", '[{"type":"logs","logs":"2"}]'),
    ]  # fmt: skip


def test_items_without_anything_to_read_are_left_out() -> None:
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "abc"}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    found = translated(input=[user("hello"), encrypted, search, search, SAID])
    assert [said.role for said in found.chat.messages] == ["user", "assistant"]
    assert found.chat.messages[1].reasoning_content is None
    assert found.warnings == [
        "input: encrypted reasoning is left out",
        "input: items of type 'web_search_call' are left out",
    ]
    assert translated(input=[user("hello"), THOUGHT | {"encrypted_content": "abc"}]).warnings == []


def test_tools_that_items_bring_are_offered() -> None:
    brought = {"type": "tool_search_output", "call_id": "c", "tools": [AGENTS, TOOL]}
    more = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, PATCH]}
    found = chat(input=[user("hello"), brought, more], tools=[TOOL])
    assert [tool["function"]["name"] for tool in found["tools"]] == ["look", "agents.send", "agents.wait", "patch"]
    assert [said["role"] for said in found["messages"]] == ["user"]


def test_messages_of_other_agents_are_the_users() -> None:
    said = {"type": "agent_message", "author": "a", "recipient": "b", "content": [{"type": "input_text", "text": "go"}]}
    assert messages(said) == [{"role": "user", "content": "go"}]
