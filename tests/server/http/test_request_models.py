"""Parsing of request bodies."""

import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.server.formats.schemas import ChatRequest
from roseinfer.server.http import request_models
from roseinfer.server.http.limits import Limits
from roseinfer.server.http.request_models import RequestParser


def test_expected_models_are_built_before_their_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = RequestParser(Limits.of(ServerConfig()))
    parser.expect(ChatRequest)
    parser.warm_up()
    monkeypatch.setattr(request_models, "create_model", None)
    assert parser.parse(ChatRequest, {"messages": [{"role": "user", "content": "x"}]}).messages[0].role == "user"
