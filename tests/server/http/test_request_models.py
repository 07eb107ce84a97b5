"""Parsing of request bodies."""

from typing import Any

import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.server.formats.schemas import ChatRequest, CompletionRequest
from roseinfer.server.http import request_models
from roseinfer.server.http.errors import ApiError
from roseinfer.server.http.limits import Limits
from roseinfer.server.http.request_models import RequestParser, parse


def test_expected_models_are_built_before_their_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = RequestParser(Limits.of(ServerConfig()))
    parser.expect(ChatRequest)
    parser.warm_up()
    monkeypatch.setattr(request_models, "create_model", None)
    assert parser.parse(ChatRequest, {"messages": [{"role": "user", "content": "x"}]}).messages[0].role == "user"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2, got 3"),
        ({"priority": "high"}, "priority: Input should be a valid integer, got 'high'"),
        ({"stream": 1}, "stream: Input should be a valid boolean, got 1"),
        ({"top_p": False}, "top_p: Input should be a valid number, got false"),
        ({"max_tokens": [1]}, "max_tokens: Input should be a valid integer"),
        ({"seed": "x" * 99}, "seed: Input should be a valid integer"),
        ({"max_tokens": -(10**5000)}, "max_tokens: Input should be greater than or equal to 0"),
    ],
)
def test_errors_name_a_short_wrong_value(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(CompletionRequest, {"prompt": "x", **body})
    assert str(raised.value) == message


def test_errors_do_not_repeat_texts() -> None:
    with pytest.raises(ApiError) as raised:
        parse(ChatRequest, {"messages": "secret"})
    assert str(raised.value) == "messages: Input should be a valid list"
