"""Responses and Messages as users meet them: `roseinfer serve` with the embedded model, and the makers' own clients."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from roseinfer import LLM, SamplingParams
from tests.server.real_server import PATIENCE_S, RealServer

MESSAGES = [{"role": "user", "content": "def fibonacci("}]
LENGTH = 24
EXAMPLES = Path(__file__).parents[3] / "examples"


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]
    dark: bool


@pytest.fixture(scope="module")
def made(shared: RealServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=shared.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def claude(made: anthropic.Anthropic, real: RealServer) -> anthropic.Anthropic:
    return made


@pytest.fixture(scope="module")
def said(llm: LLM) -> tuple[str, int]:
    """Return the model's greedy output and the prompt's length, computed in this process."""
    (done,) = llm.chat(MESSAGES, SamplingParams(max_tokens=LENGTH, temperature=0.0))
    return done.outputs[0].text, len(done.prompt_token_ids)


def test_a_response_whole_and_streamed(client: openai.OpenAI, said: tuple[str, int]) -> None:
    body: Any = {"model": "tiny", "input": "def fibonacci(", "temperature": 0.0, "max_output_tokens": LENGTH}
    whole = client.responses.create(**body)
    assert whole.output_text == said[0] and whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (said[1], LENGTH)
    *_, last = client.responses.create(**body, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == said[0]


def test_a_response_is_parsed(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "input": "A colour:", "text_format": Colour, "temperature": 0.0}
    parsed = client.responses.parse(**body)
    assert isinstance(parsed.output_parsed, Colour) and parsed.status == "completed"
    with client.responses.stream(**body) as stream:
        done = next(event for event in stream if event.type == "response.output_text.done")
        assert done.parsed == parsed.output_parsed
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_message_whole_and_streamed(claude: anthropic.Anthropic, said: tuple[str, int]) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": LENGTH, "extra_body": {"temperature": 0.0}}
    whole = claude.messages.create(**body)
    assert [block.text for block in whole.content] == [said[0]] and whole.stop_reason == "max_tokens"
    usage = whole.usage
    assert (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens) == (said[1], LENGTH)
    with claude.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == said[0]
        assert stream.get_final_message().stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
    assert counted.input_tokens == said[1]


def test_a_stop_sequence(claude: anthropic.Anthropic, said: tuple[str, int]) -> None:
    stop = said[0][7:11]
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": LENGTH, "extra_body": {"temperature": 0.0}}
    message = claude.messages.create(**body, stop_sequences=["∎", stop])
    assert message.content[0].text == said[0][: said[0].index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_a_message_follows_a_schema(claude: anthropic.Anthropic) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "extra_body": {"temperature": 0.0}}
    parsed = claude.messages.parse(**body, output_format=Colour)
    assert isinstance(parsed.parsed_output, Colour) and parsed.stop_reason == "end_turn"
    with claude.messages.stream(**body, output_format=Colour) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


# --- tools ------------------------------------------------------------------------------------------------------
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def asked_of_responses(choice: Any) -> Any:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    more = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 0.0}
    return {"model": "tiny", "input": "Weather?", "tools": [tool]} | more


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        pytest.param({"type": "function", "name": "weather"}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_response_calls_a_tool(client: openai.OpenAI, choice: Any) -> None:
    body = asked_of_responses(choice)
    whole = client.responses.create(**body)
    (call,) = whole.output
    assert (call.type, call.name, call.status, whole.status) == ("function_call", "weather", "completed", "completed")
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    with client.responses.stream(**body) as stream:
        events = list(stream)
        final: Any = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (streamed,) = final.output
    assert (streamed.arguments, streamed.parsed_arguments) == (call.arguments, json.loads(call.arguments))
    item_ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert item_ids == {streamed.id}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turn = [{"role": "user", "content": "Weather?"}, call, result]
    after = client.responses.create(**body | {"input": turn, "tool_choice": "none", "max_output_tokens": 5})
    assert [item.type for item in after.output] == ["message"]


def test_a_message_calls_a_tool(claude: anthropic.Anthropic) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "extra_body": {"temperature": 0.0}}
    body["tools"] = [{"name": "weather", "input_schema": WEATHER, "strict": True}]
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}):
        whole = claude.messages.create(**body, tool_choice=choice)
        (call,) = whole.content
        assert (call.type, call.name, whole.stop_reason) == ("tool_use", "weather", "tool_use")
        jsonschema.validate(call.input, WEATHER)
        with claude.messages.stream(**body, tool_choice=choice) as stream:
            final: Any = stream.get_final_message()
        assert [block.type for block in final.content] == ["tool_use"] and final.content[0].input == call.input
        assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = claude.messages.create(**body | {"messages": turns, "max_tokens": 5}, tool_choice={"type": "none"})
    assert [block.type for block in after.content] == ["text"]


def test_a_call_that_was_cut(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "extra_body": {"temperature": 0.0}}
    body["tools"] = [{"name": "weather", "input_schema": WEATHER, "strict": True}]
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    length = claude.messages.create(**body, max_tokens=200).usage.output_tokens // 2
    message = claude.messages.create(**body, max_tokens=length)
    assert message.stop_reason == "max_tokens" and [block.type for block in message.content] == ["tool_use"]
    response = client.responses.create(**asked_of_responses("required"), max_output_tokens=length)
    assert response.status == "incomplete" and [item.status for item in response.output] == ["incomplete"]


def test_tools_count_among_the_tokens(claude: anthropic.Anthropic, said: tuple[str, int]) -> None:
    tools: Any = [{"name": "weather", "input_schema": WEATHER}]
    counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES, tools=tools)  # type: ignore[arg-type]
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    usage = claude.messages.create(**body, tools=tools).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > said[1]


def test_wrong_tools_are_named_as_they_were_written(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    tool: Any = {"type": "function", "name": "a b"}
    with pytest.raises(openai.BadRequestError, match=r"tools\.0\.name must be"):
        client.responses.create(model="tiny", input="x", tools=[tool])
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0\.input_schema must be"):
        claude.messages.create(**body, tools=[{"name": "a", "input_schema": 3}])


def test_a_model_that_does_not_think_keeps_every_budget(claude: anthropic.Anthropic) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}
    message = claude.messages.create(**body, thinking={"type": "enabled", "budget_tokens": 8})
    assert message.to_dict()["warnings"] == ["thinking.budget_tokens: the model has no reasoning"]


def test_schemas_that_cannot_be_enforced_are_refused_by_their_field(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    wanted: Any = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input="x", text={"format": wanted})
    assert refused.value.param == "text.format" and "not" in refused.value.message
    format: Any = {"format": {"type": "json_schema", "schema": schema}}
    with pytest.raises(anthropic.BadRequestError) as raised:
        claude.messages.create(model="tiny", messages=MESSAGES, max_tokens=5, output_config=format)  # type: ignore[arg-type]
    body: Any = raised.value.body
    assert body["error"]["details"]["param"] == "output_config.format"


# --- the examples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "below", "expected"),
    [
        ("responses", "/v1", ["text: ", "parsed: Review(", "called: weather(", "answer: "]),
        ("anthropic_messages", "", ["text: ", "parsed: Review(", "prompt: ", "called: weather(", "answer: "]),
    ],
)
def test_the_example(
    real: RealServer,
    name: str,
    below: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--base-url", real.url + below])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert [line[: len(start)] for line, start in zip(printed.splitlines(), expected, strict=True)] == expected, printed
