"""pydantic-ai over each of the three APIs."""

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from steps import CALL, HELLO, KEY, MODEL, URL, run, weather

openai_server = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
MODELS = (
    OpenAIChatModel(MODEL, provider=openai_server),
    OpenAIResponsesModel(MODEL, provider=openai_server),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
)
LOOP = asyncio.Runner()


class Person(BaseModel):
    name: str
    age: int


def ask(prompt: str, agent: Agent) -> object:
    return LOOP.run(agent.run(prompt)).output


def plain() -> None:
    for model in MODELS:
        ask(HELLO, Agent(model))


def stream() -> None:
    async def read(model: object) -> None:
        async with Agent(model).run_stream(HELLO) as answer:
            assert [text async for text in answer.stream_text(debounce_by=None)]

    for model in MODELS:
        LOOP.run(read(model))


def tool() -> None:
    for model in MODELS:
        ask(CALL, Agent(model, tools=[weather]))


def tool_output() -> None:
    for model in MODELS:
        assert isinstance(ask(HELLO, Agent(model, output_type=ToolOutput(Person))), Person)


def native_output() -> None:
    for model in MODELS[:2]:  # of Anthropic's it knows by name which can do that
        assert isinstance(ask(HELLO, Agent(model, output_type=NativeOutput(Person))), Person)


run(plain, stream, tool, tool_output, native_output)
