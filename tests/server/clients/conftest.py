"""A server whose model answers as a good one would, so that client libraries get what they ask for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.live import PATIENCE_S
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import tool_caller


def call(name: str, /, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SEND = {"type": "function", "name": "send", "description": "Send a text.", "parameters": TEXT, "strict": False}
JOKE = {"setup": "Why do cats purr?", "punchline": "They idle."}
# What the prompt holds, and what its newest message asks for -> the answer; the first that fits.
ANSWERS = (
    ("", r"^<tool_response>", "So it is."),
    ("", r"magic_function_no_args\(\)", call("magic_function_no_args")),
    ("", r"magic_function\(3\)|^Hello!$", call("magic_function", input=3)),
    ("", "Pirate", call("greeting_generator", answer_style="Pirate")),
    ("", "San Francisco", call("get_weather", location="San Francisco")),
    ("", "你好啊集团", call("unicode_customer", customer_name="你好啊集团", description="x")),
    ("", "こんにちは", call("unicode_customer", customer_name="こんにちは", description="x")),
    ("", r"3 \+ 4", call("my_adder_tool", a=3, b=4)),
    ('"name": "Joke"', "joke about cats", call("Joke", **JOKE)),
    ("", "joke about cats", json.dumps(JOKE)),
    ('"name": "Person"', "Jason is 25", call("Person", name="Jason", age=25)),
    ("", "Jason is 25", json.dumps({"name": "Jason", "age": 25})),
    ("", "", "Hello to you."),
)
TURN = re.compile(r"<\|user\|>((?:(?!<\|user\|>).)*)<\|end\|><\|assistant\|>$", re.DOTALL)


def answer(prompt: str) -> str:
    newest = TURN.search(prompt)
    asked = newest[1] if newest else ""
    return next(said for held, pattern, said in ANSWERS if held in prompt and re.search(pattern, asked))


@pytest.fixture(scope="package")
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer(tool_caller(), answer) as server:
        yield server


@pytest.fixture(scope="module")
def client(scripted: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def respond(client: openai.OpenAI, stream: bool, **body: Any) -> Any:
    """The response, from a stream's last event or whole."""
    if not stream:
        return client.responses.create(model="fake", **body)
    with client.responses.stream(model="fake", **body) as events:
        return events.get_final_response()


@pytest.fixture(autouse=True)
def nothing_forbidden(scripted: ScriptedServer) -> Iterator[None]:
    """No grammar forbids what the model of a test says."""
    yield
    forbidden, scripted.runner.forbidden = scripted.runner.forbidden, []
    assert not forbidden
