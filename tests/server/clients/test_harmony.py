"""A model that speaks harmony, through openai's client and the real engine."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients.conftest import respond
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import harmony

NEXT = "<|end|><|start|>assistant"
THINKS = f"<|channel|>analysis<|message|>Rain?{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>I look.{NEXT}"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": PARAMETERS | {"additionalProperties": False}, "strict": True}


def answer(prompt: str) -> str:
    if "<|start|>functions.weather to=assistant" not in prompt:
        return THINKS + PREAMBLE + CALL
    thought = "<|channel|>analysis<|message|>Rain?" in prompt
    return "<|channel|>final<|message|>" + ("It is dry." if thought else "I forgot.")


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer(harmony(), answer) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_two_turns_of_an_agent(client: openai.OpenAI, stream: bool, stored: bool) -> None:
    items: list[Any] = [{"role": "user", "content": "Bonn?"}]
    tools: Any = [{"type": "function", **WEATHER}]
    first = respond(client, stream, input=items, tools=tools)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text == "I look."
    call = first.output[-1]
    assert (call.name, call.arguments) == ("weather", '{"city": "Bonn"}')
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}]
    fields: Any = {"input": items[-1:], "previous_response_id": first.id} if stored else {"input": items}
    second = respond(client, stream, tools=tools, **fields)
    assert second.output_text == "It is dry."


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": WEATHER}]
    messages: Any = [{"role": "user", "content": "Bonn?"}]
    with client.chat.completions.stream(model="fake", messages=messages, tools=tools) as stream:
        done = stream.get_final_completion()
    (choice,) = done.choices
    (call,) = choice.message.tool_calls or []
    assert (call.function.parsed_arguments, choice.finish_reason) == ({"city": "Bonn"}, "tool_calls")
    assert choice.message.content == "I look."
