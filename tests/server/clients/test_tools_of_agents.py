"""Tools as Codex describes them, through openai's client and the real engine."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients.conftest import SEND, call, respond
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import tool_caller

AGENTS = {"type": "namespace", "name": "multi_agent_v1", "description": "Other agents.", "tools": [SEND]}
LETTERS = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+\n"}
PATCH = {"type": "custom", "name": "apply_patch", "format": LETTERS}
SEARCH = {"type": "web_search", "external_web_access": False}
CALLED = call("multi_agent_v1.send", text="hello")
PATCHED = call("apply_patch", input="def\n")


def answer(prompt: str) -> str:
    if "<tool_response>" in prompt:
        return "Done." if CALLED in prompt or PATCHED in prompt else "It is not known what was called."
    return PATCHED if "patch it" in prompt else CALLED


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer(tool_caller(), answer) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", {"type": "function", "name": "send", "namespace": "multi_agent_v1"}])
def test_a_function_of_a_namespace(client: openai.OpenAI, stream: bool, choice: Any) -> None:
    items: list[Any] = [{"role": "user", "content": "hello"}]
    fields: Any = {"tools": [AGENTS, SEARCH, PATCH], "tool_choice": choice, "parallel_tool_calls": False}
    first = respond(client, stream, input=items, **fields)
    [item] = first.output
    assert (item.type, item.name, item.namespace) == ("function_call", "send", "multi_agent_v1")
    assert item.arguments == '{"text": "hello"}'
    items += [item, {"type": "function_call_output", "call_id": item.call_id, "output": "sent"}]
    assert respond(client, stream, input=items, tools=fields["tools"]).output_text == "Done."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "apply_patch"}])
def test_a_custom_tool(client: openai.OpenAI, stream: bool, choice: Any) -> None:
    items: list[Any] = [{"role": "user", "content": "patch it"}]
    fields: Any = {"tools": [AGENTS, SEARCH, PATCH], "tool_choice": choice, "parallel_tool_calls": False}
    first = respond(client, stream, input=items, **fields)
    [item] = first.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", "def\n")
    items += [item, {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "patched"}]
    assert respond(client, stream, input=items, tools=fields["tools"]).output_text == "Done."


def test_the_grammar_of_a_custom_tool_is_enforced(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    digits = PATCH | {"format": LETTERS | {"definition": "[0-9]+"}}
    fields: Any = {"tools": [digits], "tool_choice": "required"}
    client.responses.create(model="fake", input="patch it", max_output_tokens=60, **fields)
    assert scripted.runner.forbidden, "the model would have written letters"
    scripted.runner.forbidden = []
