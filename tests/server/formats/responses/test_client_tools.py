"""Tools that OpenAI describes and clients run: what the model is offered, and what its calls become."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseInputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from roseinfer.core.outputs import FinishReason
from roseinfer.grammar.library import GrammarTokens, compile_grammar
from roseinfer.server.formats.responses.client_tools import CLIENT_TOOLS
from roseinfer.server.formats.responses.document import ResponseObject
from roseinfer.server.formats.responses.format import ResponsesFormat
from roseinfer.server.formats.responses.request import ResponsesRequest, ResponsesTranslation
from roseinfer.server.formats.tool_fields import Calls, ToolUse
from roseinfer.server.formats.tool_grammar import tool_constraint
from roseinfer.server.http.errors import ApiError, engine_failed
from roseinfer.server.http.request_models import parse
from roseinfer.text.tools.registry import format_names, tool_format
from tests.helpers.cases import cases
from tests.server.formats.played import Events, call, chunks, streamed, whole
from tests.text.tools.recorded import plain_tokenizer

SHELL: dict[str, Any] = {"type": "shell", "environment": {"type": "local"}}
LOCAL_SHELL = {"type": "local_shell"}
APPLY_PATCH = {"type": "apply_patch"}
ALL = [SHELL, LOCAL_SHELL, APPLY_PATCH]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
INPUT_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItem)
ABOUT = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": ALL, "temperature": 1.0, "top_p": 1.0}
ABOUT |= {"instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {}, "user": None}
ABOUT |= {"reasoning": {"effort": None, "summary": None}, "text": {}, "top_logprobs": 0, "truncation": "disabled"}

# Tool, arguments as a model writes them, field of the call's item with them, and its value.
CALLS = [
    ("shell", {"commands": ["ls", "pwd"]}, "action", {"timeout_ms": None, "max_output_length": None}),
    ("shell", {"commands": ["ls"], "timeout_ms": 50, "max_output_length": 9}, "action", {}),
    (
        "local_shell",
        {"command": ["ls"], "env": {"A": "b"}},
        "action",
        {"type": "exec", "timeout_ms": None, "user": None, "working_directory": None},
    ),
    (
        "local_shell",
        {"command": ["ls"], "env": {}, "timeout_ms": 5, "user": "me", "working_directory": "/"},
        "action",
        {"type": "exec"},
    ),
    ("apply_patch", {"type": "create_file", "path": "a.py", "diff": "+é\n"}, "operation", {}),
    ("apply_patch", {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"}, "operation", {}),
    ("apply_patch", {"type": "delete_file", "path": "a.py", "diff": ""}, "operation", {"diff": None}),
]


def translated(**fields: Any) -> ResponsesTranslation:
    return ResponsesTranslation(parse(ResponsesRequest, {"input": "x", "tools": ALL} | fields))


def functions(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [tool["function"] for tool in translated(tools=list(tools)).chat.tools or []]


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        translated(**fields)
    assert raised.value.status == 400
    return raised.value


def played(name: str, *arguments: str, complete: bool = True, finish: FinishReason = FinishReason.STOP) -> Events:
    """The events of a stream. Its response is that of an answer without a stream."""
    given = chunks(call(0, name, *arguments, complete=complete), finish)
    names = translated().call_names
    events = streamed(ResponsesFormat(), given, about=ABOUT, call_names=names)
    response = whole(ResponsesFormat(), given, about=ABOUT, call_names=names)
    last = events[-1][1]["response"]
    assert last["output"] == response["output"]
    assert [data["item"] for kind, data in events if kind == "response.output_item.done"] == last["output"]
    for number, (_, data) in enumerate(events):
        assert data["sequence_number"] == number
        EVENT.validate_python(data)
    ResponseObject.model_validate(last)
    Response.model_validate(last)
    return events


def item_of(events: Events) -> dict[str, Any]:
    (item,) = events[-1][1]["response"]["output"]
    found: dict[str, Any] = item
    return found


# --- what the model is offered ------------------------------------------------------------------------------------
def test_they_are_strict_functions() -> None:
    found = translated()
    offered = [tool["function"] for tool in found.chat.tools or []]
    assert [function["name"] for function in offered] == ["shell", "local_shell", "apply_patch"]
    assert all(function["strict"] and function["description"] for function in offered)
    required = [function["parameters"]["required"] for function in offered]
    assert required == [["commands"], ["command", "env"], ["type", "path", "diff"]]
    assert found.warnings == []


@pytest.mark.parametrize("environment", [None, {"type": "local"}, {"type": "local", "skills": []}])
def test_a_shell_is_local_unless_it_says_otherwise(environment: Any) -> None:
    (function,) = functions({"type": "shell", "environment": environment})
    assert function == functions({"type": "shell"})[0]


@pytest.mark.parametrize("kind", ["container_auto", "container_reference", "unheard of", ["local"]])
def test_a_shell_in_a_container_is_left_out(kind: Any) -> None:
    hosted = {"type": "shell", "environment": {"type": kind}}
    found = translated(tools=[hosted, APPLY_PATCH])
    assert [tool["function"]["name"] for tool in found.chat.tools or []] == ["apply_patch"]
    assert found.warnings == [f"tools.0 of type 'shell' is left out: environment {str(kind)!r} is not local"]
    assert refused(tools=[hosted], tool_choice={"type": "shell"}).param == "tool_choice"


def test_skills_of_a_local_shell_are_described() -> None:
    skill = {"name": "csv", "description": "Read tables.", "path": "/skills/csv"}
    (function,) = functions(SHELL | {"environment": {"type": "local", "skills": [skill]}})
    assert function["description"].endswith("\n- csv (/skills/csv): Read tables.")


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ([SHELL | {"environment": "local"}], "tools.0.environment must be an object"),
        ([SHELL | {"environment": {"type": "local", "skills": "csv"}}], "tools.0.environment.skills must be a list"),
        ([SHELL | {"environment": {"type": "local", "skills": ["csv"]}}], "tools.0.environment.skills must be a list"),
        (
            [SHELL | {"environment": {"type": "local", "skills": [{"name": "csv", "description": ""}]}}],
            "tools.0.environment.skills.0.path must be a string",
        ),
        ([SHELL, SHELL], "tools.1.name: 'shell' is there twice"),
        ([SHELL | {"allowed_callers": ["programmatic"]}], "tools.0.allowed_callers"),
    ],
)
def test_errors_in_tools_have_their_place(tools: list[dict[str, Any]], place: str) -> None:
    error = refused(tools=tools)
    assert place in error.message


def test_unknown_fields_are_named() -> None:
    assert translated(tools=[APPLY_PATCH | {"mood": 1}]).warnings == ["tools.mood"]


@pytest.mark.parametrize("name", [tool["type"] for tool in ALL])
def test_choices(name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    assert translated(tool_choice={"type": name}).chat.tool_choice == named
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": name}]}
    choice = translated(tool_choice=allowed).chat.tool_choice
    assert choice == {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    others = [tool for tool in ALL if tool["type"] != name]
    error = refused(tools=others, tool_choice={"type": name})
    assert (error.param, error.code) == ("tool_choice", "unsupported_field") and name in error.message


def test_allowed_tools_that_are_left_out() -> None:
    hosted = {"type": "shell", "environment": {"type": "container_auto"}}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "shell"}, APPLY_PATCH]}
    found = translated(tools=[hosted, APPLY_PATCH], tool_choice=allowed)
    assert found.warnings[-1] == "tool_choice.tools: those that cannot be called here are left out"
    assert refused(tools=[hosted, APPLY_PATCH], tool_choice=allowed | {"tools": [{"type": "shell"}]}).param


# --- what its calls become ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "arguments", "field", "more"), CALLS)
def test_a_call_is_an_item_and_comes_back(name: str, arguments: Any, field: str, more: dict[str, Any]) -> None:
    item = item_of(played(name, json.dumps(arguments)))
    expected = {key: value for key, value in (arguments | more).items() if (key, value) != ("diff", None)}
    assert (item["type"], item["status"], item["call_id"]) == (f"{name}_call", "completed", "call_0")
    assert item[field] == expected and item.get("environment") == (None if name != "shell" else {"type": "local"})
    sent_back = INPUT_ITEM.validate_python(item).model_dump(exclude_unset=True)
    for given in (item, sent_back, sent_back | {field: dict(reversed(sent_back[field].items()))}):
        (message,) = translated(input=[given]).chat.messages
        (made,) = message.tool_calls or []
        assert made["function"]["name"] == name
        assert json.dumps(made["function"]["arguments"]) == json.dumps(arguments), "in the order of the schema"


def test_the_commands_of_a_shell_are_events() -> None:
    events = played("shell", '{"commands": ["ls",', ' "pwd"]}')[2:-1]
    place = {"item_id": "sh_r_0", "output_index": 0}
    assert [kind.removeprefix("response.") for kind, _ in events] == [
        "output_item.added",
        *["shell_call_command.added", "shell_call_command.delta", "shell_call_command.done"] * 2,
        "output_item.done",
    ]
    added = events[0][1]["item"]
    assert (added["status"], added["action"]["commands"]) == ("in_progress", [])
    said = [{key: value for key, value in data.items() if key not in ("type", "sequence_number")} for _, data in events]
    assert said[4:7] == [
        place | {"command_index": 1, "command": ""},
        place | {"command_index": 1, "delta": "pwd"},
        place | {"command_index": 1, "command": "pwd"},
    ]


def test_a_patch_is_added_when_it_is_complete() -> None:
    operation = {"type": "create_file", "path": "a", "diff": "+b"}
    added, done = played("apply_patch", json.dumps(operation))[2:-1]
    assert (added[0], done[0]) == ("response.output_item.added", "response.output_item.done")
    assert added[1]["item"] == done[1]["item"] | {"status": "in_progress"}
    assert done[1]["item"]["operation"] == operation


WRONG = [
    ("shell", "{}"),
    ("shell", ""),
    ("shell", "no JSON"),
    ("shell", "[" * 10_000),
    ("shell", '{"commands": []}'),
    ("shell", '{"commands": "ls"}'),
    ("shell", '{"commands": [5]}'),
    ("shell", '{"commands": ["ls"], "timeout_ms": 0}'),
    ("shell", '{"commands": ["ls"], "timeout_ms": 1' + "0" * 400 + "}"),
    ("shell", '{"commands": ["\\ud800"]}'),
    ("local_shell", '{"command": ["ls"], "env": {"A": 1}}'),
    ("apply_patch", '{"type": "create_file", "path": "a"}'),
    ("apply_patch", '{"type": "move_file", "path": "a", "diff": ""}'),
    ("apply_patch", "null"),
]


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_a_call_with_wrong_arguments_is_that_of_a_function(name: str, text: str) -> None:
    events = played(name, *([text] if text else []))
    item = item_of(events)
    assert (item["type"], item["name"], item["arguments"], item["status"]) == ("function_call", name, text, "completed")
    assert events[2][1]["item"] == item | {"status": "in_progress", "arguments": ""}
    deltas = [data["delta"] for kind, data in events if kind == "response.function_call_arguments.delta"]
    assert "".join(deltas) == text
    (message,) = translated(input=[item]).chat.messages
    (made,) = message.tool_calls or []
    assert made["function"] == {"name": name, "arguments": text}


@pytest.mark.parametrize("text", ['{"commands": ["rm -r /tmp/a', '{"commands": ["rm -r /tmp/a"]}'])
def test_a_call_that_was_cut_is_not_run(text: str) -> None:
    item = item_of(played("shell", text, complete=False, finish=FinishReason.LENGTH))
    assert (item["type"], item["status"], item["arguments"]) == ("function_call", "incomplete", text)


def test_a_failure_within_a_call() -> None:
    given = chunks(call(0, "shell", '{"commands": ["ls"]}'))[:2]
    events = streamed(ResponsesFormat(), given, engine_failed(None), about=ABOUT, call_names=translated().call_names)
    (item,) = events[-1][1]["response"]["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")


def test_a_tool_that_was_not_offered_is_a_function() -> None:
    given = chunks(call(0, "shell", '{"commands": ["ls"]}'))
    (item,) = whole(ResponsesFormat(), given, about=ABOUT, call_names={})["output"]
    assert (item["type"], item["name"]) == ("function_call", "shell")


# --- items of earlier turns ---------------------------------------------------------------------------------------
def contents(*items: dict[str, Any]) -> list[Any]:
    return [message.content for message in translated(input=list(items)).chat.messages]


def test_results() -> None:
    ran = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
    shell = {"type": "shell_call_output", "call_id": "c", "output": [ran], "max_output_length": 9}
    patch = {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}
    failed = {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"}
    items = [shell, patch, patch | {"output": "done"}, failed, failed | {"output": "no such file"}]
    for item in items:
        INPUT_ITEM.validate_python(item)
    expected = ["completed", "done", "failed", "failed\nno such file"]
    assert contents(*items) == [json.dumps([ran], separators=(",", ":")), *expected]


@pytest.mark.parametrize("kind", CLIENT_TOOLS, ids=lambda kind: kind.type)
@pytest.mark.parametrize("value", [None, 5, "ls", [], {"more": {"a": 1}}])
def test_items_of_other_servers(kind: Any, value: Any) -> None:
    item = {"type": kind.item, "id": "x", kind.field: value}
    (message,) = translated(input=[item]).chat.messages
    (made,) = message.tool_calls or []
    arguments = made["function"]["arguments"]
    assert arguments == ({**kind.absent, **value} if isinstance(value, dict) else {kind.field: value})


@pytest.mark.parametrize("kind", ["shell_call", "shell_call_output", "mcp_call"])
def test_the_id_of_a_call(kind: str) -> None:
    """Items have it as `call_id` or as their own id. Some clients send all fields, the absent ones as null."""
    item = {"type": kind, "output": "x"}
    for named in ({"call_id": "c"}, {"call_id": "c", "id": "d"}, {"call_id": None, "id": "c"}, {"id": "c"}):
        message = translated(input=[item | named]).chat.messages[0]
        assert "c" in (message.tool_call_id, *(made["id"] for made in message.tool_calls or []))
    assert refused(input=[item]).message == "input.0.call_id must be a string"


def test_an_item_that_is_nested_too_deep() -> None:
    deep = json.loads("[" * 300 + "]" * 300)
    assert refused(input=[{"type": "shell_call", "call_id": "c", "action": {"commands": deep}}]).param == "input"


# --- grammars -----------------------------------------------------------------------------------------------------
@cases("name", ["hermes", "qwen_xml"], exhaustive=[n for n in format_names() if n not in ("hermes", "qwen_xml")])
@pytest.mark.parametrize("calls", [Calls.PERHAPS, Calls.ALWAYS])
def test_every_format_of_calls_can_enforce_them(name: str, calls: Calls) -> None:
    chat = translated(tool_choice=calls.value).chat
    use = ToolUse.of(chat)
    assert use is not None
    prepared, warnings = tool_constraint(tool_format(name, plain_tokenizer()), use, None, False)
    assert not warnings
    tokens = GrammarTokens.of(plain_tokenizer(), plain_tokenizer().vocab_size, [0])
    grammars = [prepared.grammar] if prepared.grammar else [trigger.grammar for trigger in prepared.triggers]
    for grammar in grammars:
        compile_grammar(grammar, tokens)
