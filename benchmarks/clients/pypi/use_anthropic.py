"""Anthropic's SDK: Messages, token counts, models."""

import anthropic
from pydantic import BaseModel
from steps import CALL, FOUND, HELLO, KEY, MODEL, URL, WEATHER, run

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL = {"name": "weather", "input_schema": WEATHER}
ASKED = [{"role": "user", "content": HELLO}]
ASKED_CALL = [{"role": "user", "content": CALL}]
FIELDS = {"model": MODEL, "max_tokens": 200}


class Person(BaseModel):
    name: str
    age: int


def models() -> None:
    (model,) = client.models.list().data
    assert (model.id, model.type) == (MODEL, "model") and model.display_name and model.created_at


def message() -> None:
    assert client.messages.create(messages=ASKED, **FIELDS).stop_reason == "end_turn"


def stream() -> None:
    with client.messages.stream(messages=ASKED, **FIELDS) as events:
        assert events.get_final_message().stop_reason == "end_turn"


def more_than_the_context() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=10_000_000, messages=ASKED, stream=True)
    assert [event.type for event in answer][-1] == "message_stop"


def thinking() -> None:
    asked = {"type": "enabled", "budget_tokens": 1024}
    answer = client.messages.create(model=MODEL, max_tokens=2048, messages=ASKED, thinking=asked)
    assert answer.stop_reason == "end_turn"


def tool() -> None:
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}, {"type": "auto"}):
        choice["disable_parallel_tool_use"] = True
        first = client.messages.create(messages=ASKED_CALL, tools=[TOOL], tool_choice=choice, **FIELDS)
        (call,) = [block for block in first.content if block.type == "tool_use"]
        assert call.input == {"city": "Oslo"} and first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": FOUND}
        turns = [*ASKED_CALL, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(messages=turns, tools=[TOOL], **FIELDS).stop_reason == "end_turn"


def tool_runner() -> None:
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather in a city."""
        return FOUND

    runner = client.beta.messages.tool_runner(messages=ASKED_CALL, tools=[weather], **FIELDS)
    assert runner.until_done().stop_reason == "end_turn"


def parse() -> None:
    parsed = client.messages.parse(messages=ASKED, output_format=Person, **FIELDS).parsed_output
    assert isinstance(parsed, Person)


def count_tokens() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=ASKED, tools=[TOOL]).input_tokens > 0


run(models, message, stream, more_than_the_context, thinking, tool, tool_runner, parse, count_tokens)
