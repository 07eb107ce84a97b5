"""instructor: the modes that a server can enforce."""

import anthropic
import instructor
import openai
from pydantic import BaseModel
from steps import HELLO, KEY, MODEL, URL, run

Mode = instructor.Mode
ASKED = [{"role": "user", "content": HELLO}]


class Person(BaseModel):
    name: str
    age: int


def by_openai(mode: Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=mode)
    person = client.chat.completions.create(model=MODEL, messages=ASKED, response_model=Person, max_retries=0)
    assert isinstance(person, Person)


def tools() -> None:
    by_openai(Mode.TOOLS)


def tools_strict() -> None:
    by_openai(Mode.TOOLS_STRICT)


def json() -> None:
    by_openai(Mode.JSON_SCHEMA)


def responses_tools() -> None:
    by_openai(Mode.RESPONSES_TOOLS)


def partial_stream() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=Mode.TOOLS)
    parts = client.chat.completions.create_partial(model=MODEL, messages=ASKED, response_model=Person, max_retries=0)
    assert list(parts)[-1].age is not None


def anthropic_tools() -> None:
    made = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    client = instructor.from_anthropic(made, mode=Mode.ANTHROPIC_TOOLS)
    person = client.messages.create(model=MODEL, max_tokens=200, messages=ASKED, response_model=Person, max_retries=0)
    assert isinstance(person, Person)


run(tools, tools_strict, json, responses_tools, partial_stream, anthropic_tools)
