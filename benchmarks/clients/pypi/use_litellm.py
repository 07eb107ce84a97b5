"""LiteLLM over each of the three APIs."""

import litellm
from pydantic import BaseModel
from steps import CALL, FOUND, HELLO, KEY, MODEL, URL, WEATHER, run

TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
ASKED = [{"role": "user", "content": HELLO}]
ASKED_CALL = [{"role": "user", "content": CALL}]
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY}
FORCED = {"type": "function", "function": {"name": "weather"}}


class Person(BaseModel):
    name: str
    age: int


def chat() -> None:
    for where in (OPENAI, ANTHROPIC):
        assert litellm.completion(messages=ASKED, **where).choices[0].finish_reason == "stop"


def stream() -> None:
    for where in (OPENAI, ANTHROPIC):
        chunks = list(litellm.completion(messages=ASKED, stream=True, **where))
        assert chunks[-1].choices[0].finish_reason == "stop"


def tool() -> None:
    for where in (OPENAI, ANTHROPIC):
        first = litellm.completion(messages=ASKED_CALL, tools=[TOOL], tool_choice=FORCED, **where)
        message = first.choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": FOUND}
        last = litellm.completion(messages=[*ASKED_CALL, message.model_dump(), result], tools=[TOOL], **where)
        assert last.choices[0].finish_reason == "stop"


def schema() -> None:
    for where in (OPENAI, ANTHROPIC):
        answer = litellm.completion(messages=ASKED, response_format=Person, **where)
        assert isinstance(Person.model_validate_json(answer.choices[0].message.content), Person)


def responses() -> None:
    assert litellm.responses(input=HELLO, **OPENAI).status == "completed"


def responses_stream() -> None:
    kinds = [event.type for event in litellm.responses(input=HELLO, stream=True, **OPENAI)]
    assert kinds[-1] == "response.completed"


run(chat, stream, tool, schema, responses, responses_stream)
