"""OpenAI's agents SDK, over Responses (its default) and over chats."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel
from steps import CALL, HELLO, KEY, MODEL, URL, run, weather

client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
MODELS = (
    OpenAIResponsesModel(model=MODEL, openai_client=client),
    OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
)
LOOP = asyncio.Runner()
set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    age: int


def ask(prompt: str, agent: Agent) -> object:
    return LOOP.run(Runner.run(agent, prompt)).final_output


def plain() -> None:
    for model in MODELS:
        ask(HELLO, Agent(name="one", model=model))


def stream() -> None:
    async def read(agent: Agent) -> None:
        answer = Runner.run_streamed(agent, HELLO)
        assert [event async for event in answer.stream_events()]

    for model in MODELS:
        LOOP.run(read(Agent(name="one", model=model)))


def tool() -> None:
    for model in MODELS:
        ask(CALL, Agent(name="one", model=model, tools=[function_tool(weather)]))


def required_tool() -> None:
    for model in MODELS:
        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
        ask(HELLO, Agent(name="one", model=model, tools=[function_tool(weather)], model_settings=settings))


def handoff() -> None:
    for model in MODELS:
        other = Agent(name="other", model=model)
        settings = ModelSettings(tool_choice="required")
        ask(HELLO, Agent(name="one", model=model, handoffs=[other], model_settings=settings))


def output_type() -> None:
    for model in MODELS:
        assert isinstance(ask(HELLO, Agent(name="one", model=model, output_type=Person)), Person)


run(plain, stream, tool, required_tool, handoff, output_type)
