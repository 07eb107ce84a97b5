"""Retry advice: whether a failed request may be sent again, and what clients with their default retries do."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from roseinfer.core.errors import (
    EngineDeadError,
    EngineLostError,
    EngineUnavailableError,
    NoTokenAllowedError,
    OutputTextError,
    RequestFailedError,
    RoseinferError,
)
from roseinfer.core.slo import Cause, Rejection
from roseinfer.engine.api import GenerateRequest
from roseinfer.server.answer_shapes import ErrorBody
from roseinfer.server.formats.messages.dialect import ANTHROPIC
from roseinfer.server.formats.messages.document import MessageErrorBody
from roseinfer.server.http.errors import SloUnattainable, as_api_error, bad_request, body_too_slow, deadline_exceeded
from tests.server.fake_engine import Step, Wait
from tests.server.live import LiveServer

LOST = EngineLostError("two engines are gone", retry_s=0.2)
ONLY_SUSPECT = EngineLostError("it crashed", only_suspect=True)


@pytest.mark.parametrize(
    ("error", "retryable", "after_s"),
    [
        (EngineDeadError("gone"), True, None),
        (EngineDeadError("gone", retry_s=2.5), True, 3),
        (LOST, True, 1),
        (ONLY_SUSPECT, False, None),
        (EngineUnavailableError("none", 7.0), True, 7),
        (RequestFailedError("nan"), True, None),
        (OutputTextError(ValueError("x")), False, None),
        (NoTokenAllowedError("x"), False, None),
        (SloUnattainable(Rejection("ttft", 2.0)), True, 2),
        (SloUnattainable(Rejection("ttft", 2.0, Cause.IDLE)), False, None),
        (deadline_exceeded(), False, None),
        (body_too_slow(1.0), True, None),
        (bad_request("no"), False, None),
        (ZeroDivisionError(), True, None),
    ],
)
def test_every_error_says_whether_to_send_the_request_again(
    error: Exception, retryable: bool, after_s: int | None
) -> None:
    answer = as_api_error(error)
    fields = json.loads(answer.body())["error"]
    assert (fields["retryable"], fields.get("retry_after_s")) == (retryable, after_s)
    details = json.loads(ANTHROPIC.error_body(answer))["error"]["details"]
    assert (details["retryable"], details.get("retry_after_s")) == (retryable, after_s)
    ErrorBody.model_validate_json(answer.body())
    MessageErrorBody.model_validate_json(ANTHROPIC.error_body(answer))
    by_status = answer.status >= 500 or answer.status in (408, 409, 429)
    advice = answer.headers().get("x-should-retry", "true" if by_status else "false")
    assert advice == ("true" if retryable else "false"), "clients decide alike"


def fail_first(server: LiveServer, error: RoseinferError) -> list[str]:
    """Let the first request fail. Return the list to which each request's id will be added."""
    seen: list[str] = []

    def script(request: GenerateRequest) -> list[Step]:
        seen.append(request.request_id)
        return [error] if len(seen) == 1 else server.engine.default_script(request)

    server.engine.script = script
    return seen


def ask_openai(server: LiveServer, stream: bool) -> str:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        if not stream:
            return client.completions.create(model="fake", prompt="x").choices[0].text
        return "".join(
            chunk.choices[0].text for chunk in client.completions.create(model="fake", prompt="x", stream=True)
        )


def ask_anthropic(server: LiveServer, stream: bool) -> str:
    body: dict[str, Any] = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        if not stream:
            return client.messages.create(**body).content[0].text  # type: ignore[union-attr]
        with client.messages.stream(**body) as events:
            return "".join(events.text_stream)


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
@pytest.mark.parametrize(("error", "stream"), [(EngineDeadError("gone"), False), (EngineLostError("x"), True)])
def test_default_clients_send_a_request_again_that_has_sent_them_nothing(
    server: LiveServer, ask: Callable[[LiveServer, bool], str], error: RoseinferError, stream: bool
) -> None:
    seen = fail_first(server, error)
    assert ask(server, stream).startswith("hello")
    assert len(seen) == 2


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
def test_default_clients_do_not_send_a_request_again_that_crashes_engines(
    server: LiveServer, ask: Callable[[LiveServer, bool], str]
) -> None:
    seen = fail_first(server, ONLY_SUSPECT)
    with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="do not send it again"):
        ask(server, False)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("error", "advice"), [(EngineDeadError("gone", 4.0), (True, 4)), (ONLY_SUSPECT, (False, None))]
)
def test_a_stream_that_broke_says_whether_to_ask_anew(
    server: LiveServer, error: RoseinferError, advice: tuple[bool, int | None]
) -> None:
    first = server.engine.default_script
    server.engine.script = lambda request: [first(request)[0], Wait(), error]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        answer = client.completions.create(model="fake", prompt="x", stream=True)
        assert next(iter(answer)).choices[0].text == "hello"
        server.call(server.engine.release)
        with pytest.raises(openai.APIError) as raised:
            list(answer)
    body: Any = raised.value.body
    assert (body["retryable"], body.get("retry_after_s")) == advice
    assert len(server.engine.requests) == 1, "the client does not repeat what it has begun to read"
