"""OpenAI's SDK: chats, Responses, stored responses."""

import json

import openai
from openai import pydantic_function_tool
from pydantic import BaseModel
from steps import CALL, FOUND, HELLO, KEY, MODEL, URL, WEATHER, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
TOOL = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
ASKED = [{"role": "user", "content": HELLO}]
ASKED_CALL = [{"role": "user", "content": CALL}]


class Person(BaseModel):
    name: str
    age: int


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASKED)
    assert answer.choices[0].finish_reason == "stop"


def chat_stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED) as events:
        assert events.get_final_completion().choices[0].finish_reason == "stop"


def chat_tool() -> None:
    forced = {"type": "function", "function": {"name": "weather"}}
    for choice in (forced, "required", "auto"):
        first = client.chat.completions.create(
            model=MODEL, messages=ASKED_CALL, tools=[CHAT_TOOL], tool_choice=choice, parallel_tool_calls=False
        )
        message = first.choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        result = {"role": "tool", "tool_call_id": call.id, "content": FOUND}
        turns = [*ASKED_CALL, message.model_dump(exclude_none=True), result]
        last = client.chat.completions.create(model=MODEL, messages=turns, tools=[CHAT_TOOL])
        assert last.choices[0].finish_reason == "stop"


def chat_parse() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


def chat_parsed_tool() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASKED, tools=[pydantic_function_tool(Person)], tool_choice="required"
    )
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


def responses() -> None:
    assert client.responses.create(model=MODEL, input=HELLO).status == "completed"


def responses_stream() -> None:
    with client.responses.stream(model=MODEL, input=HELLO) as events:
        assert events.get_final_response().status == "completed"


def responses_tool() -> None:
    first = client.responses.create(model=MODEL, input=ASKED_CALL, tools=[TOOL], tool_choice="required")
    call = next(item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": FOUND}
    last = client.responses.create(model=MODEL, input=[*ASKED_CALL, *first.output, result], tools=[TOOL])
    assert last.status == "completed"


def responses_parse() -> None:
    assert isinstance(client.responses.parse(model=MODEL, input=HELLO, text_format=Person).output_parsed, Person)


def responses_stored() -> None:
    first = client.responses.create(model=MODEL, input=ASKED_CALL, tools=[TOOL], tool_choice="required")
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": FOUND}
    last = client.responses.create(model=MODEL, previous_response_id=first.id, input=[result], tools=[TOOL])
    assert last.status == "completed" and last.previous_response_id == first.id
    assert client.responses.retrieve(last.id).output_text == last.output_text
    assert client.responses.input_items.list(last.id).data
    client.responses.delete(last.id)


def responses_input_tokens() -> None:
    assert client.responses.input_tokens.count(model=MODEL, input=HELLO).input_tokens > 0


run(
    models,
    chat,
    chat_stream,
    chat_tool,
    chat_parse,
    chat_parsed_tool,
    responses,
    responses_stream,
    responses_tool,
    responses_parse,
    responses_stored,
    responses_input_tokens,
)
