"""Agents over a model that thinks, talks and calls two tools at once: OpenAI's Responses and Anthropic's Messages."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.server.clients.conftest import call, respond
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import tool_caller

THOUGHT = "Two cities, two calls."
CALLS = f"{call('weather', city='Oslo')}\n{call('weather', city='Rome')}"
ASKED = {"role": "user", "content": "Oslo or Rome?"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESULTS = ("rain", "sun")


class City(BaseModel):
    name: Literal["Oslo", "Rome"]


def answer(prompt: str) -> str:
    if "as JSON" in prompt:
        return '<think>\nEasy.\n</think>\n\n{"name": "Rome"}'
    if "<think>\n\n</think>\n\n" in prompt[-30:]:
        return "Rome."
    if "sun" in prompt:
        # What was thought before is part of what the model sees.
        return f"<think>\n{THOUGHT in prompt}\n</think>\n\nRome."
    return f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n{CALLS}"


@pytest.fixture(scope="module")
def thinker() -> Iterator[ScriptedServer]:
    with ScriptedServer(tool_caller(thinks=True), answer) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_forbidden(thinker: ScriptedServer) -> Iterator[None]:
    yield
    forbidden, thinker.runner.forbidden = thinker.runner.forbidden, []
    assert not forbidden


@pytest.fixture(scope="module")
def client(thinker: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(thinker: ScriptedServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as made:
        yield made


# --- responses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_agent(client: openai.OpenAI, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
    items: list[Any] = [ASKED]
    first = respond(client, stream, input=items, tools=tools)
    thought, said, *calls = first.output
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert THOUGHT in thought.content[0].text and said.content[0].text.strip() == "Let me see."
    assert [json.loads(item.arguments) for item in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    items += first.output
    for item, result in zip(calls, RESULTS, strict=True):
        items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    last = respond(client, stream, input=items, tools=tools)
    assert last.output_text.strip() == "Rome." and last.status == "completed"
    assert last.output[0].content[0].text.strip() == "True", "the earlier thought is in the prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_begins_behind_the_thinking(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        with client.responses.stream(model="fake", input="A city, as JSON", text_format=City) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.parse(model="fake", input="A city, as JSON", text_format=City)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_parsed == City(name="Rome")


def test_no_effort_is_no_thinking(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="Well?", reasoning={"effort": "none"})
    assert [item.type for item in response.output] == ["message"] and response.output_text == "Rome."


# --- messages ---------------------------------------------------------------------------------------------------


def message(claude: anthropic.Anthropic, stream: bool, **body: Any) -> Any:
    body = {"model": "fake", "max_tokens": 500} | body
    if not stream:
        return claude.messages.create(**body)
    with claude.messages.stream(**body) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_messages_agent(claude: anthropic.Anthropic, stream: bool) -> None:
    tools: Any = [{"name": "weather", "input_schema": WEATHER, "strict": True}]
    turns: list[Any] = [ASKED]
    first = message(claude, stream, messages=turns, tools=tools)
    thought, said, *calls = first.content
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert THOUGHT in thought.thinking and thought.signature == "" and said.text.strip() == "Let me see."
    assert [block.input for block in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert first.stop_reason == "tool_use" and first.usage.output_tokens_details.thinking_tokens > 0
    found = zip(calls, RESULTS, strict=True)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": result} for block, result in found]
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = message(claude, stream, messages=turns, tools=tools)
    assert [block.type for block in last.content] == ["thinking", "text"] and last.stop_reason == "end_turn"
    assert last.content[0].thinking.strip() == "True" and last.content[1].text.strip() == "Rome."


@pytest.mark.parametrize("stream", [False, True])
def test_one_tool_at_a_time(claude: anthropic.Anthropic, stream: bool) -> None:
    tools: Any = [{"name": "weather", "input_schema": WEATHER}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    first = message(claude, stream, messages=[ASKED], tools=tools, tool_choice=choice)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"


def test_thinking_switched_off(claude: anthropic.Anthropic) -> None:
    found = message(claude, False, messages=[{"role": "user", "content": "Well?"}], thinking={"type": "disabled"})
    assert [block.type for block in found.content] == ["text"] and found.content[0].text == "Rome."


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_of_thinking(thinker: ScriptedServer, claude: anthropic.Anthropic, stream: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 3}
    found = message(claude, stream, messages=[ASKED], thinking=thinking)
    assert found.content[0].type == "thinking" and "No more time" in found.content[0].thinking
    assert THOUGHT not in found.content[0].thinking
    assert thinker.runner.forbidden, "the model would have gone on"
    thinker.runner.forbidden = []


def test_a_format_behind_the_thinking(claude: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "A city, as JSON"}]
    parsed = claude.messages.parse(model="fake", max_tokens=500, messages=asked, output_format=City)
    assert [block.type for block in parsed.content] == ["thinking", "text"]
    assert parsed.parsed_output == City(name="Rome")
