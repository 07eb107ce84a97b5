"""langchain: langchain-openai over chats and Responses, langchain-anthropic."""

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from steps import CALL, FOUND, HELLO, KEY, MODEL, URL, run

OPENAI = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
MODELS = (
    ChatOpenAI(**OPENAI),
    ChatOpenAI(**OPENAI, use_responses_api=True),
    ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0),
)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@as_tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    return FOUND


def plain() -> None:
    for model in MODELS:
        model.invoke(HELLO)


def stream() -> None:
    for model in MODELS:
        assert list(model.stream(HELLO))


def tool() -> None:
    for model in MODELS:
        first = model.bind_tools([weather], tool_choice="weather").invoke(CALL)
        (call,) = first.tool_calls
        result = ToolMessage(FOUND, tool_call_id=call["id"])
        model.bind_tools([weather]).invoke([HumanMessage(CALL), first, result])


def agent() -> None:
    for model in MODELS:
        turns = create_agent(model, [weather]).invoke({"messages": [HumanMessage(CALL)]})["messages"]
        assert [turn.type for turn in turns] == ["human", "ai", "tool", "ai"]


def structured_output() -> None:
    for model in MODELS:
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Person, method=method).invoke(HELLO), Person)


run(plain, stream, tool, agent, structured_output)
