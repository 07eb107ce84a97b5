"""Responses and Messages as users meet them: `roseinfer serve` with the embedded model, and the makers' own clients."""

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from roseinfer import LLM, SamplingParams
from tests.server.real_server import PATIENCE_S, RealServer

MESSAGES = [{"role": "user", "content": "def fibonacci("}]
LENGTH = 24


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]
    dark: bool


@pytest.fixture(scope="module")
def made(shared: RealServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=shared.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def claude(made: anthropic.Anthropic, real: RealServer) -> anthropic.Anthropic:
    return made


@pytest.fixture(scope="module")
def said(llm: LLM) -> tuple[str, int]:
    """What the model says greedily, and how long the prompt is, in process."""
    done = llm.chat(MESSAGES, SamplingParams(max_tokens=LENGTH, temperature=0.0))
    return done.text, len(done.prompt_ids)


def test_a_response_whole_and_streamed(client: openai.OpenAI, said: tuple[str, int]) -> None:
    body: Any = {"model": "tiny", "input": "def fibonacci(", "temperature": 0.0, "max_output_tokens": LENGTH}
    whole = client.responses.create(**body)
    assert whole.output_text == said[0] and whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (said[1], LENGTH)
    *_, last = client.responses.create(**body, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == said[0]


def test_a_response_is_parsed(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "input": "A colour:", "text_format": Colour, "temperature": 0.0}
    parsed = client.responses.parse(**body)
    assert isinstance(parsed.output_parsed, Colour) and parsed.status == "completed"
    with client.responses.stream(**body) as stream:
        done = next(event for event in stream if event.type == "response.output_text.done")
        assert done.parsed == parsed.output_parsed
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_message_whole_and_streamed(claude: anthropic.Anthropic, said: tuple[str, int]) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": LENGTH, "extra_body": {"temperature": 0.0}}
    whole = claude.messages.create(**body)
    assert [block.text for block in whole.content] == [said[0]] and whole.stop_reason == "max_tokens"
    usage = whole.usage
    assert (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens) == (said[1], LENGTH)
    with claude.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == said[0]
        assert stream.get_final_message().stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
    assert counted.input_tokens == said[1]


def test_a_stop_sequence(claude: anthropic.Anthropic, said: tuple[str, int]) -> None:
    stop = said[0][7:11]
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": LENGTH, "extra_body": {"temperature": 0.0}}
    message = claude.messages.create(**body, stop_sequences=["∎", stop])
    assert message.content[0].text == said[0][: said[0].index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_a_message_follows_a_schema(claude: anthropic.Anthropic) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "extra_body": {"temperature": 0.0}}
    parsed = claude.messages.parse(**body, output_format=Colour)
    assert isinstance(parsed.parsed_output, Colour) and parsed.stop_reason == "end_turn"
    with claude.messages.stream(**body, output_format=Colour) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


def test_schemas_that_cannot_be_enforced_are_refused_by_their_field(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    wanted: Any = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input="x", text={"format": wanted})
    assert refused.value.param == "text.format" and "not" in refused.value.message
    format: Any = {"format": {"type": "json_schema", "schema": schema}}
    with pytest.raises(anthropic.BadRequestError) as raised:
        claude.messages.create(model="tiny", messages=MESSAGES, max_tokens=5, output_config=format)  # type: ignore[arg-type]
    body: Any = raised.value.body
    assert body["error"]["details"]["param"] == "output_config.format"
