"""Smolagents' `OpenAIServerModel`, over chats."""

from smolagents import OpenAIServerModel, tool
from steps import CALL, FOUND, HELLO, KEY, MODEL, URL, run

model = OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=200)


def turn(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


@tool
def weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: name of the city
    """
    return FOUND


def chat() -> None:
    assert model.generate([turn("user", HELLO)]).content


def stream() -> None:
    assert "".join(delta.content or "" for delta in model.generate_stream([turn("user", HELLO)]))


def tool_call() -> None:
    said = [turn("user", CALL)]
    called = model.generate(said, tools_to_call_from=[weather]).tool_calls
    assert called[0].function.name == "weather"
    result = turn("user", FOUND)
    assert model.generate([*said, turn("assistant", "Calling."), result]).content


def schema() -> None:
    wanted = {"type": "object", "properties": {"agreed": {"type": "boolean"}}, "required": ["agreed"]}
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
    assert model.generate([turn("user", HELLO)], response_format=format).content


run(chat, stream, tool_call, schema)
