"""Bodies of /v1/messages as chats."""

from typing import Any

import pytest

from roseinfer.server.formats.messages.request import CountTokensRequest, MessagesRequest, MessagesTranslation
from roseinfer.server.formats.tool_fields import ToolUse
from roseinfer.server.http.errors import ApiError
from roseinfer.server.http.request_models import parse

HI = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "look", "description": "Look", "input_schema": SCHEMA}


def chat(**fields: Any) -> dict[str, Any]:
    """The fields of the chat."""
    return translated(**fields).chat.model_dump(exclude_none=True, by_alias=True)


def translated(**fields: Any) -> MessagesTranslation:
    return MessagesTranslation(parse(MessagesRequest, {"messages": [HI], "max_tokens": 9} | fields))


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat(messages=list(given), **fields)["messages"]


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        chat(**fields)
    assert raised.value.status == 400
    return raised.value


def texts(*each: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in each]


def test_system_and_turns() -> None:
    cached = [block | {"cache_control": {"type": "ephemeral"}} for block in texts("be", "brief")]
    found = messages(
        HI, {"role": "user", "content": texts("you")}, {"role": "assistant", "content": "Hi"}, system=cached
    )
    assert found == [
        {"role": "system", "content": texts("be", "brief")},
        {"role": "user", "content": texts("hello", "you")},
        {"role": "assistant", "content": "Hi"},
    ]
    assert messages(HI, system="brief")[0] == {"role": "system", "content": "brief"}
    assert messages(HI, {"role": "system", "content": "now"})[1] == {"role": "system", "content": "now"}


def test_blocks_of_a_turn_with_tools() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é", "n": 1.5}}
    thought = {"type": "thinking", "thinking": "Hm", "signature": "abc"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": texts("sunny")}
    plain = {"type": "tool_result", "tool_use_id": "t2", "content": "warm", "is_error": False}
    empty = {"type": "tool_result", "tool_use_id": "t3"}
    assert messages(
        HI,
        {"role": "assistant", "content": [thought, *texts("Well"), call, call | {"id": "t2"}]},
        {"role": "user", "content": [result, plain, empty, *texts("and?")]},
    ) == [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "reasoning_content": "Hm",
            "content": "Well",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "look", "arguments": {"at": "é", "n": 1.5}}}
                for name in ("t1", "t2")
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "warm"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "and?"},
    ]


def test_an_assistants_last_message_is_gone_on_with() -> None:
    begun = {"role": "assistant", "content": "Once"}
    assert chat(messages=[HI, begun])["continue_final_message"] is True
    assert "continue_final_message" not in chat(messages=[HI, begun, HI])


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_messages_without_content(role: str) -> None:
    error = refused(messages=[{"role": role, "content": []}])
    assert (error.param, error.message) == ("messages", "messages contain no text, tool calls or results")


CONTENT = "unsupported_content"
BLOCK = "messages.0.content.0"
IMAGE_IN_DOCUMENT = {"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}
UNKNOWN_CHANGE = {"type": "tool_update", "tool": {"type": "tool_reference", "name": "look"}}


@pytest.mark.parametrize(
    ("message", "place", "code"),
    [
        ({"role": "user", "content": [{"type": "image", "source": {}}]}, BLOCK, CONTENT),
        ({"role": "user", "content": [{"type": "document"}]}, BLOCK, CONTENT),
        ({"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "x"}}]},
         BLOCK, CONTENT),
        ({"role": "user", "content": [IMAGE_IN_DOCUMENT]}, f"{BLOCK}.source.content.0", CONTENT),
        ({"role": "user", "content": [{"type": "search_result", "source": "u"}]}, f"{BLOCK}.content", None),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, BLOCK, CONTENT),
        ({"role": "user", "content": [{"type": "tool_use"}]}, BLOCK, CONTENT),
        ({"role": "assistant", "content": [{"type": "tool_result"}]}, BLOCK, CONTENT),
        ({"role": "assistant", "content": [{"type": "container_upload", "file_id": "x"}]}, BLOCK, CONTENT),
        ({"role": "assistant", "content": [{"type": "compaction", "encrypted_content": "x"}]}, BLOCK, CONTENT),
        ({"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}, BLOCK, CONTENT),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}, f"{BLOCK}.input", None),
        ({"role": "assistant", "content": [{"type": "tool_use", "name": "b", "input": {}}]}, f"{BLOCK}.id", None),
        ({"role": "user", "content": [{"type": "tool_result"}]}, f"{BLOCK}.tool_use_id", None),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]},
            "messages.0.content.0.content.0", CONTENT,
        ),
        ({"role": "user", "content": [{"type": "text"}]}, f"{BLOCK}.text", None),
        ({"role": "tool", "content": "x"}, "messages.0.role", None),
        ({"role": "user", "content": None}, "messages.0.content", None),
        ({"role": "user"}, "messages.0.content", None),
        ({"role": "user", "content": "x", "clear_at": "never"}, "messages.0.clear_at", None),
        ({"role": "system", "content": "x", "clear_at": "later"}, "messages.0.clear_at", None),
        ({"role": "user", "content": [{"type": "tool_removal"}]}, BLOCK, CONTENT),
        ({"role": "system", "content": [{"type": "tool_removal"}]}, f"{BLOCK}.tool", None),
        ({"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_definition"}}]},
         f"{BLOCK}.tool", None),
        ({"role": "assistant", "content": [{"type": "compaction", "content": "x", "tool_changes": ["x"]}]},
         f"{BLOCK}.tool_changes", None),
        ({"role": "assistant", "content": [{"type": "compaction", "tool_changes": {}}]}, f"{BLOCK}.tool_changes", None),
        ({"role": "assistant", "content": [{"type": "compaction", "content": [], "tool_changes": []}]},
         f"{BLOCK}.content", None),
        ({"role": "assistant", "content": [{"type": "compaction", "content": "x", "tool_changes": [UNKNOWN_CHANGE]}]},
         f"{BLOCK}.tool_changes.0.type", None),
        ({"content": "x"}, "messages.0.role", None),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_taken(message: dict[str, Any], place: str, code: str | None) -> None:
    error = refused(messages=[message])
    assert (error.param, error.code) == ("messages", code) and error.message.startswith(place)


def test_tools() -> None:
    found = chat(tools=[TOOL, {"type": "custom", "name": "f", "input_schema": {}, "strict": True}])
    assert found["tools"] == [
        {"type": "function", "function": {"name": "look", "description": "Look", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}},
    ]
    assert not {"tool_choice", "parallel_tool_calls"} & set(found)
    assert "tools" not in chat(tools=[])


@pytest.mark.parametrize(
    ("choice", "there", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}, None),
        ({"type": "auto", "disable_parallel_tool_use": False}, "auto", None),
    ],
)
def test_tool_choices(choice: dict[str, Any], there: Any, parallel: bool | None) -> None:
    found = chat(tools=[TOOL], tool_choice=choice)
    assert (found["tool_choice"], found.get("parallel_tool_calls")) == (there, parallel)


@pytest.mark.parametrize(
    ("thinking", "budget", "effort"),
    [
        ({"type": "enabled", "budget_tokens": 8}, 8, None),
        ({"type": "disabled"}, None, "none"),
        ({"type": "adaptive", "display": "summarized"}, None, None),
    ],
)
def test_thinking(thinking: dict[str, Any], budget: int | None, effort: str | None) -> None:
    found = chat(thinking=thinking)
    assert (found.get("thinking_token_budget"), found.get("reasoning_effort")) == (budget, effort)


def test_formats_are_enforced() -> None:
    found = chat(output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"})
    schema = {"name": "output", "schema": SCHEMA, "strict": True}
    assert found["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert found["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL | {"allowed_callers": ["code_execution_20260521"]}]}, "tools.0.allowed_callers"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"container": "c"}, "container"),
        ({"stop": "x"}, "stop"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == ("unsupported_field", param)


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_is_refused_with_the_code_that_clients_go_on_after(thread: dict[str, Any]) -> None:
    error = refused(thread=thread)
    assert (error.code, error.param) == ("thread_unsupported_request", "thread")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"stop_sequences": "x"}, "stop_sequences"),
    ],
)
def test_wrong(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_what_is_passed_on() -> None:
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stream": True, "seed": 4, "service_tier": "auto", "mood": 1}
    inert = {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}, "speed": "standard"}
    found = chat(stop_sequences=["a", "b"], **same, **inert)
    assert found == chat() | same | {"stop": ["a", "b"]} and found["max_completion_tokens"] == 9


def test_what_is_ignored_within_fields_is_named() -> None:
    failed = {"type": "tool_result", "tool_use_id": "x", "content": "no", "is_error": True}
    body: Any = {"messages": [{"role": "user", "content": [failed]}], "max_tokens": 1, "output_config": {"mood": 1}}
    described = {"input_examples": [{}], "cache_control": {"type": "ephemeral"}}
    body["tools"] = [TOOL | described, TOOL | described | {"name": "other"}]
    assert MessagesTranslation(parse(MessagesRequest, body)).warnings == [
        "output_config.mood",
        "tools.input_examples",
        "messages.content.is_error",
    ]


@pytest.mark.parametrize("names", [("n", "prediction", "logprobs"), ("logprobs", "prediction", "n")])
def test_of_several_fields_of_chats_the_first_is_named(names: tuple[str, ...]) -> None:
    assert refused(**dict.fromkeys(names, 1)).param == names[0]


def test_tools_of_anthropics_own_are_left_out() -> None:
    search = {"type": "web_search_20260209", "name": "web_search", "max_uses": 8}
    found = translated(tools=[search, TOOL | {"defer_loading": True, "allowed_callers": ["direct", "x"]}])
    assert [tool["function"]["name"] for tool in found.chat.tools or []] == ["look"]
    assert found.warnings == ["tools.0 of type 'web_search_20260209' is left out"]
    wrong = refused(tools=[search, TOOL | {"input_schema": 5}])
    assert wrong.message.startswith("tools.1.input_schema must be")
    assert refused(tools=[search, TOOL, TOOL]).message.startswith("tools.2.name")
    assert refused(tools=[search] * 6000).code == "grammar_too_complex"
    assert refused(tools=[{"type": 5}]).message.startswith("tools.0.type")


def system(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(content), **fields}


def changed(kind: str, **tool: Any) -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": tool}


def test_a_text_of_the_system_is_cleared_by_a_later_message_of_the_user() -> None:
    """Claude Code sends reminders like this."""
    reminder = {"role": "system", "content": "Be brief.", "clear_at": "next_user_message"}
    said = {"role": "assistant", "content": "Hi"}
    assert messages(HI, reminder) == [HI, {"role": "system", "content": "Be brief."}]
    assert messages(HI, reminder, said, HI) == [HI, said, HI]
    kept = reminder | {"clear_at": "never"}
    assert messages(HI, kept, said, HI) == [HI, {"role": "system", "content": "Be brief."}, said, HI]


@pytest.mark.parametrize("message", [{"role": "system"}, system(), system(*texts("x"))])
def test_an_effort_of_one_turn_is_accepted_with_a_warning(message: dict[str, Any]) -> None:
    found = translated(messages=[HI, message | {"output_config": {"effort": "high"}}])
    assert found.warnings == ["messages.output_config"]


def test_messages_change_the_tools() -> None:
    new = {"name": "new", "input_schema": SCHEMA}
    other, again = TOOL | {"name": "other"}, new | {"description": "Newer"}
    adds = changed("addition", type="tool_definition", definition=new)
    found = translated(
        tools=[TOOL, other],
        messages=[
            HI,
            system(changed("removal", type="tool_reference", name="look"), adds, clear_at="next_user_message"),
            HI,
            system(changed("removal", type="tool_reference", name="other"), *texts("Tools changed.")),
            system(changed("addition", type="tool_reference", name="look")),
            system(changed("addition", type="tool_definition", definition=again)),
            system(changed("addition", type="mcp_toolset_reference", mcp_server_name="x")),
        ],
    )
    functions = {tool["function"]["name"]: tool["function"] for tool in found.chat.tools or []}
    assert list(functions) == ["look", "new"] and functions["new"]["description"] == "Newer"
    assert [message.role for message in found.chat.messages] == ["user", "system"]
    assert found.warnings == ["messages: changes of type 'mcp_toolset_reference' are left out"]


def test_the_last_tool_is_removed() -> None:
    removal = changed("removal", type="tool_reference", name="look")
    assert "tools" not in chat(tools=[TOOL], messages=[HI, system(removal)])


def test_the_choice_of_a_removed_tool_is_refused() -> None:
    removal = changed("removal", type="tool_reference", name="look")
    wanted = {"type": "tool", "name": "look"}
    for tools in ([TOOL], [TOOL, TOOL | {"name": "other"}]):
        found = translated(tools=tools, messages=[HI, system(removal)], tool_choice=wanted)
        with pytest.raises(ApiError) as raised:
            ToolUse.of(found.chat)
        assert (raised.value.status, raised.value.param) == (400, "tool_choice")


def test_a_compaction_that_failed_is_left_out() -> None:
    removal = changed("removal", type="tool_reference", name="look")
    failed = {"type": "compaction", "content": None, "tool_changes": [removal]}
    found = translated(tools=[TOOL], messages=[HI, {"role": "assistant", "content": [failed]}, HI])
    assert [message.role for message in found.chat.messages] == ["user"] and not found.chat.tools
    assert found.warnings == ["messages: blocks of type 'compaction' without content are left out"]


def test_blocks_of_other_servers_are_shown_as_far_as_they_can_be_read() -> None:
    found_pages = [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "abc"}]
    content = [
        {"type": "redacted_thinking", "data": "abc"},
        *texts("Well"),
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": found_pages},
        {"type": "mcp_tool_use", "id": "s2", "name": "ask", "server_name": "m", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "s2", "content": texts("yes"), "is_error": False},
        {"type": "compaction", "content": "Before that: nothing."},
        *texts("So."),
    ]
    found = translated(messages=[HI, {"role": "assistant", "content": content}, HI])
    said = found.chat.model_dump(exclude_none=True)["messages"]

    def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert said[1:-1] == [
        {"role": "assistant", "content": "Well", "tool_calls": [call("s1", "web_search", {"query": "q"})]},
        {"role": "tool", "tool_call_id": "s1", "content": '[{"type":"web_search_result","title":"T","url":"u"}]'},
        {"role": "assistant", "tool_calls": [call("s2", "ask", {})]},
        {"role": "tool", "tool_call_id": "s2", "content": "yes"},
        {"role": "assistant", "content": texts("Before that: nothing.", "So.")},
    ]
    assert found.warnings == ["messages: blocks of type 'redacted_thinking' are left out"]


def test_results_of_other_servers_that_are_no_text() -> None:
    page = {"type": "document", "source": {"type": "base64", "data": "abc"}}
    block = {"type": "web_fetch_tool_result", "tool_use_id": "s1", "content": {"content": page}}
    error = refused(messages=[HI, {"role": "assistant", "content": [block]}])
    assert error.code == CONTENT and error.message.startswith("messages.1.content.0.content")


def test_messages_of_which_nothing_is_left_are_rejected() -> None:
    only = [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "abc"}]}]
    with pytest.raises(ApiError) as raised:
        translated(messages=only)
    assert (raised.value.status, raised.value.param) == (400, "messages")


FOUND = {"type": "search_result", "title": "T", "source": "u", "content": texts("one", "two")}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (FOUND, "T\nu\none\ntwo"),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}}, "one"),
        ({"type": "document", "title": "T", "source": {"type": "content", "content": texts("one", "two")}},
         "T\none\ntwo"),
        ({"type": "document", "title": None, "context": "C", "source": {"type": "content", "content": "one"}},
         "C\none"),
    ],
)  # fmt: skip
def test_documents_of_text_are_read(block: dict[str, Any], text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block, *texts("!")]}
    assert messages({"role": "user", "content": [block, *texts("?")]})[0]["content"] == texts(text, "?")
    assert messages({"role": "user", "content": [result]})[0]["content"] == texts(text, "!")


def test_citations_are_not_made() -> None:
    found = translated(messages=[{"role": "user", "content": [FOUND | {"citations": {"enabled": True}}]}])
    assert found.warnings == ["messages.content.citations"]
    off = translated(messages=[{"role": "user", "content": [FOUND | {"citations": {"enabled": False}}]}])
    assert off.warnings == []


def test_found_tools_are_named() -> None:
    content = [{"type": "tool_reference", "tool_name": "look"}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    assert messages({"role": "user", "content": [result]})[0]["content"] == "look"


SCHEMA_FORMAT = {"type": "json_schema", "schema": SCHEMA}


def test_a_format_by_its_older_name() -> None:
    newer = chat(output_config={"format": SCHEMA_FORMAT})
    assert chat(output_format=SCHEMA_FORMAT) == newer
    assert chat(output_format=SCHEMA_FORMAT, output_config={"format": SCHEMA_FORMAT}) == newer
    other = refused(output_format=SCHEMA_FORMAT, output_config={"format": SCHEMA_FORMAT | {"schema": {}}})
    assert other.param == "output_format"
    assert refused(output_format={"type": "text"}).param == "output_format"


def test_counting_needs_no_length() -> None:
    for body in ({"messages": [HI]}, {"messages": [HI], "max_tokens": 5}):
        assert MessagesTranslation(parse(CountTokensRequest, body)).chat.max_completion_tokens is None
