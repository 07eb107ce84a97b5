"""Tool calls of the embedded model through the openai client: a grammar has it write them, whatever it would say."""

import json
import runpy
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel, Field

from roseinfer.text.chat import ChatTemplate
from roseinfer.text.tools.registry import detect
from tests.server.real_server import RealServer, until
from tests.text.tokenizers import byte_level

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Bonn?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[Any] = [WEATHER, CLOCK]
FIELDS: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 160, "temperature": 1.0, "top_p": 0.9}


def check(call: Any, name: str | None = None) -> None:
    """A call of one of TOOLS, whole."""
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.id.startswith("call_") and len(call.id) == 29 and call.function.name == (name or call.function.name)
    arguments = json.loads(call.function.arguments)
    if call.function.name == "clock":
        assert arguments == {}
    else:
        assert call.function.name == "get_weather" and set(arguments) == {"city", "unit"}
        assert len(arguments["city"]) <= 12 and arguments["unit"] in ("C", "F")


@pytest.mark.parametrize("name", ["get_weather", "clock"])
def test_a_named_tool_is_called_once(client: openai.OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    done = client.chat.completions.create(**FIELDS, tools=TOOLS, tool_choice=choice, seed=1)
    (call,) = done.choices[0].message.tool_calls or []
    check(call, name)
    assert done.choices[0].message.content is None and done.choices[0].finish_reason == "tool_calls"


def test_required_calls_for_each_of_several_samples(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        **FIELDS, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=3, seed=7, logprobs=True
    )
    ids = [call.id for choice in done.choices for call in choice.message.tool_calls or []]
    assert len(done.choices) == 3 == len(set(ids)), "a call each, by ids of their own"
    for choice in done.choices:
        check((choice.message.tool_calls or [])[0])
        assert choice.finish_reason == "tool_calls"
        assert choice.logprobs is not None and choice.logprobs.content
    assert done.usage is not None
    assert done.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in done.choices)  # type: ignore


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    asked: Any = {**FIELDS, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    whole = client.chat.completions.create(**asked).choices[0]
    seen: Counter[str] = Counter()
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            seen[event.type] += 1
            if event.type == "tool_calls.function.arguments.done":
                assert event.arguments == (whole.message.tool_calls or [])[0].function.arguments  # type: ignore
        final = stream.get_final_completion().choices[0]
    (call,), (other,) = final.message.tool_calls or [], whole.message.tool_calls or []
    check(call)
    assert call.function == type(call.function)(**other.function.model_dump())  # type: ignore[union-attr]
    assert final.finish_reason == whole.finish_reason and not final.message.content
    assert seen["tool_calls.function.arguments.done"] == 1 and seen["tool_calls.function.arguments.delta"] > 1


class City(BaseModel):
    """The weather of a city"""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


def test_arguments_come_as_the_class_that_the_client_wrote(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(City, name="get_weather")
    assert tool["function"]["strict"] is True
    done = client.chat.completions.parse(**FIELDS, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = done.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, City)


def test_a_model_that_need_not_call_does_as_it_likes(client: openai.OpenAI) -> None:
    fields = {**FIELDS, "max_tokens": 24, "seed": 1}
    done = client.chat.completions.create(**fields, tools=TOOLS)
    message = done.choices[0].message
    assert message.content and not message.tool_calls and done.choices[0].finish_reason in ("stop", "length")
    never = client.chat.completions.create(**fields, tools=TOOLS, tool_choice="none")
    assert never.choices[0].message.content == message.content, "the same prompt"
    plain = client.chat.completions.create(**fields)
    assert plain.usage and done.usage and plain.usage.prompt_tokens < done.usage.prompt_tokens


def test_a_conversation_goes_on_behind_a_call(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    called = client.chat.completions.create(**FIELDS, tools=TOOLS, tool_choice=choice, seed=1).choices[0].message
    (call,) = called.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages: list[Any] = [*ASK, called.model_dump(exclude_none=True), result]
    fields = {**FIELDS, "messages": messages, "max_tokens": 8}
    answered: ChatCompletion = client.chat.completions.create(**fields, tools=TOOLS)
    assert answered.usage is not None and not hasattr(answered, "warnings")


def test_an_output_that_is_cut_ends_with_length(client: openai.OpenAI) -> None:
    fields: Any = {**FIELDS, "max_tokens": 26, "seed": 1, "tools": TOOLS, "tool_choice": "required"}
    done = client.chat.completions.create(**fields).choices[0]
    assert done.finish_reason == "length"
    chunks = [chunk for chunk in client.chat.completions.create(**fields, stream=True) if chunk.choices]
    said = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    arguments = "".join(call.function.arguments or "" for call in said if call.function)
    (call,) = done.message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert arguments == call.function.arguments and arguments.startswith("{")
    assert sum(call.id is not None for call in said) == 1 and chunks[-1].choices[0].finish_reason == "length"


def test_calls_or_a_document(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["clear", "grey"]}},
        "required": ["sky"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}}
    done = client.chat.completions.create(
        **FIELDS, tools=TOOLS, response_format=wanted, parallel_tool_calls=False, n=2, seed=5
    )
    for choice in done.choices:
        if choice.message.tool_calls:
            check(choice.message.tool_calls[0])
            assert choice.finish_reason == "tool_calls"
        else:
            assert json.loads(choice.message.content or "")["sky"] in ("clear", "grey")
            assert choice.finish_reason == "stop"


def test_calls_are_counted_by_the_parser(real: RealServer, client: openai.OpenAI) -> None:
    names = ("roseinfer:tool_calls_total", "roseinfer:tool_call_parse_failures_total")
    before = real.metrics(*names, parser="hermes")
    client.chat.completions.create(**FIELDS, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=2)
    until(lambda: real.metrics(*names, parser="hermes") == [before[0] + 2, before[1]])


def test_the_example(real: RealServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn must call a tool and gets its result."""
    monkeypatch.setattr("sys.argv", ["tools.py", "--base-url", f"{real.url}/v1"])
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "tools.py"), run_name="__main__")
    called, _, result = capsys.readouterr().out.partition("\n-> ")
    assert called.startswith(("get_weather({", "add({")) and called.endswith("})")
    assert result.startswith(('{"city": ', '{"sum": '))


def test_the_template_of_the_examples() -> None:
    template = Path(__file__).parents[3] / "examples" / "chatml_tools.jinja"
    source = template.read_text(encoding="utf-8")
    assert detect(source) == "hermes"
    messages: list[Any] = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "sunny"},
    ]
    text = ChatTemplate(source, byte_level()).render(messages, tools=TOOLS)
    assert text.startswith("<|im_start|>system\nYou are") and '{"name": "clock"}\n</tools>' in text
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert text.endswith(
        f"<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<tools>" not in ChatTemplate(source, byte_level()).render(ASK)
