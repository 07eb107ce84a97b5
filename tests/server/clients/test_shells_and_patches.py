"""Tools that OpenAI describes and clients run, through openai's client and the real engine."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients.conftest import call, respond
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import tool_caller

TOOLS: list[Any] = [
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "local_shell"},
    {"type": "apply_patch"},
]
RAN = {"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
# Tool -> what the model writes, the type of the item of its result, and that result.
CALLED = {
    "shell": call("shell", commands=["ls", "echo é"], timeout_ms=500),
    "local_shell": call("local_shell", command=["ls"], env={"A": "b"}, working_directory="/"),
    "apply_patch": call("apply_patch", type="update_file", path="a.py", diff="@@\n-a\n+b\n"),
    "delete": call("apply_patch", type="delete_file", path="a.py", diff=""),
}
WRONG = call("shell", commands=["ls"], timeout_ms="soon")
RESULTS: dict[str, dict[str, Any]] = {
    "shell": {"type": "shell_call_output", "output": [RAN]},
    "local_shell": {"type": "local_shell_call_output", "output": "a.py"},
    "apply_patch": {"type": "apply_patch_call_output", "status": "completed"},
    "delete": {"type": "apply_patch_call_output", "status": "failed", "output": "no such file"},
}


def answer(prompt: str) -> str:
    if "<tool_response>" in prompt:
        return "Done." if any(said in prompt for said in CALLED.values()) else "It is not known what was called."
    if "use numbers" in prompt:
        return WRONG
    return next(said for name, said in CALLED.items() if f"use {name}<" in prompt)


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer(tool_caller(), answer) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "chosen"), [*((name, False) for name in CALLED), ("shell", True), ("apply_patch", True)]
)
def test_two_turns(client: openai.OpenAI, name: str, chosen: bool, stream: bool) -> None:
    tool = "apply_patch" if name == "delete" else name
    items: list[Any] = [{"role": "user", "content": f"use {name}"}]
    fields: Any = {"tools": TOOLS, "parallel_tool_calls": False}
    first = respond(client, stream, input=items, tool_choice={"type": tool} if chosen else "auto", **fields)
    [item] = first.output
    assert (item.type, item.status) == (f"{tool}_call", "completed")
    result = RESULTS[name] | {"call_id": item.call_id}
    second = respond(client, stream, input=[*items, item, result], **fields)
    assert second.output_text == "Done."
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens, "the call is in the prefix cache"


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("referred", [False, True])
def test_stored_calls(client: openai.OpenAI, name: str, referred: bool) -> None:
    """The next request names the response, or its items."""
    user: Any = {"role": "user", "content": f"use {name}"}
    first = respond(client, False, input=[user], tools=TOOLS)
    [item] = first.output
    result = RESULTS[name] | {"call_id": item.call_id}
    fields: Any = {"input": [result], "previous_response_id": first.id}
    if referred:
        fields = {"input": [user, {"type": "item_reference", "id": item.id}, result]}
    assert respond(client, False, tools=TOOLS, **fields).output_text == "Done."
    assert client.responses.retrieve(first.id).output == [item]


def test_a_result_as_codex_sends_it(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "use local_shell"}]
    [item] = respond(client, True, input=items, tools=[{"type": "local_shell"}]).output
    assert (item.type, item.action.command, item.action.env) == ("local_shell_call", ["ls"], {"A": "b"})
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "a.py"}
    assert respond(client, True, input=[*items, item, result], tools=[{"type": "local_shell"}]).output_text == "Done."


def test_a_call_that_is_cut_runs_nothing(client: openai.OpenAI) -> None:
    response: Any = client.responses.create(
        model="fake", input="use shell", tools=TOOLS, tool_choice={"type": "shell"}, max_output_tokens=40
    )
    [item] = response.output
    assert (response.status, item.type, item.status) == ("incomplete", "function_call", "incomplete")


def test_wrong_arguments_are_not_allowed(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    client.responses.create(model="fake", input="use numbers", tools=TOOLS, max_output_tokens=120)
    assert any('"timeout_ms": ' in said for said in scripted.runner.forbidden)
    scripted.runner.forbidden = []
