"""/v1/responses over HTTP, mostly through openai's client."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from roseinfer.core.errors import EngineDeadError
from roseinfer.server.answer_shapes import ErrorBody
from roseinfer.server.formats.responses.document import ResponseObject
from tests.server.fake_engine import Wait, rejected
from tests.server.live import LiveServer, http_post
from tests.server.real_server import HTTP_ERROR

PATH = "/v1/responses"


def test_text_and_prompt(client: OpenAI, server: LiveServer) -> None:
    response = client.responses.create(model="fake", input="hello", instructions="world", max_output_tokens=3)
    assert response.output_text == "hello world," and response.object == "response"
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    request = server.engine.requests[0]
    prompt = server.tokenizer.decode(request.prompt.ids, skip_special_tokens=False)
    assert prompt == "<|endoftext|><|system|>world<|end|><|user|>hello<|end|><|assistant|>"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(request.prompt.ids), 3)
    assert response.id == f"resp_{response._request_id}"


def test_a_stream_says_the_same(client: OpenAI) -> None:
    whole = client.responses.create(model="fake", input="hello")
    with client.responses.stream(model="fake", input="hello") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == whole.output_text
    assert (final.status, final.usage) == ("completed", whole.usage)
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in items] == [item.id for item in final.output]
    ids = {event.response.id for event in events if hasattr(event, "response")}
    assert ids == {final.id}


def test_the_next_turn_takes_what_was_put_out(client: OpenAI, server: LiveServer) -> None:
    first = client.responses.create(model="fake", input="hello")
    turn: list[Any] = [{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "def"}]
    client.responses.create(model="fake", input=turn, max_output_tokens=1)
    prompt = server.tokenizer.decode(server.engine.requests[1].prompt.ids, skip_special_tokens=False)
    assert prompt.endswith(
        "<|user|>hello<|end|><|assistant|>hello world, def words<|end|><|user|>def<|end|><|assistant|>"
    )


def test_a_turn_that_was_cut_while_it_thought_can_be_sent_back(server: LiveServer) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    turns = [{"role": "user", "content": "hello"}, thought, {"role": "user", "content": "def"}]
    assert server.post(PATH, {"input": turns}).status_code == 200


def test_the_response_repeats_its_request(server: LiveServer) -> None:
    body = {
        "input": "x",
        "instructions": "brief",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "store": True,
        "reasoning": {"summary": "auto"},
        "mood": "good",
        "user": "u",
    }
    answer = server.post(PATH, body).json()
    ResponseObject.model_validate(answer)
    for name in ("instructions", "metadata", "temperature", "user"):
        assert answer[name] == body[name]
    assert answer["store"] is True and answer["background"] is False and answer["previous_response_id"] is None
    assert (answer["top_p"], answer["tool_choice"], answer["tools"]) == (1.0, "auto", [])
    assert answer["warnings"] == ["mood", "reasoning.summary"]


def test_the_response_repeats_tools_that_are_left_out(server: LiveServer) -> None:
    tools = [{"type": "web_search", "external_web_access": False}]
    answer = server.post(PATH, {"input": "x", "tools": tools}).json()
    assert answer["tools"] == tools and answer["warnings"] == ["tools.0 of type 'web_search' is left out"]


def test_objectives_are_reported(server: LiveServer) -> None:
    answer = server.post(PATH, {"input": "x", "slo": {"ttft_ms": 60000, "report": True}}).json()
    ResponseObject.model_validate(answer)
    assert answer["usage"]["slo"]["met"] is True


def test_wrong_fields(client: OpenAI) -> None:
    for fields, code, param in (
        ({"max_output_tokens": 0}, None, "max_output_tokens"),
        ({"input": "hello " * 100}, "context_length_exceeded", "input"),
        ({"moderation": {"model": "x"}}, "unsupported_field", "moderation"),
        ({"previous_response_id": "resp_1"}, "previous_response_not_found", "previous_response_id"),
        ({"temperature": 3.0}, None, "temperature"),
        ({"input": [{"role": "nobody", "content": "x"}]}, None, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(**{"model": "fake", "input": "x"} | fields)  # type: ignore[call-overload]
        assert (raised.value.code, raised.value.param) == (code, param), fields
        assert param in raised.value.message or code not in (None, "unsupported_field")
        ErrorBody.model_validate_json(raised.value.response.content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_reasons(server: LiveServer, client: OpenAI, stream: bool) -> None:
    server.engine.script = lambda request: [rejected()]
    with pytest.raises(openai.RateLimitError) as raised:
        client.responses.create(model="fake", input="x", stream=stream, extra_body={"slo": {"ttft_ms": 100}})
    body: Any = raised.value.body
    assert (body["code"], body["reason"], body["cause"]) == ("slo_unattainable", "ttft", "price")


def test_a_failure_on_the_way_is_an_event_and_then_nothing(server: LiveServer, client: OpenAI) -> None:
    first = server.engine.default_script
    server.engine.script = lambda request: [first(request)[0], Wait(), EngineDeadError("gone")]
    stream = client.responses.create(model="fake", input="x", stream=True)
    seen: list[Any] = [next(stream)]
    server.call(server.engine.release)
    with pytest.raises((openai.APIError, HTTP_ERROR)):  # the connection is cut behind it
        seen += stream
    assert seen[-1].type == "response.failed" and seen[-1].response.error.code == "engine_dead"
    assert seen[-1].response.output[0].content[0].text == "hello"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_work_with_it(server: LiveServer, stream: bool) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [script(request)[0], Wait()]
    with server.connect() as connection:
        connection.sendall(http_post(PATH, {"input": "x", "stream": stream}))
        server.until(lambda: len(server.engine.live) == 1)
        if stream:
            assert connection.recv(1024)
    server.until(lambda: len(server.engine.cancelled) == 1)
