"""The engine's own limit on requests in flight."""

import openai
import pytest

from roseinfer.core.errors import TooManyInflightError
from tests.server.live import LiveServer


def test_over_the_limit_a_request_gets_429_and_when_to_come_back(server: LiveServer, client: openai.OpenAI) -> None:
    server.engine.refuse = TooManyInflightError("The server is at its limit (3)")

    def counted() -> tuple[float, float]:
        rejections = server.metric("vllm:admission_rejections_total", reason="max_inflight_requests")
        return rejections, server.metric("vllm:request_success_total", finished_reason="rejected")

    before = counted()
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="fake", prompt="x", stream=True)
    assert refused.value.code == "too_many_inflight"
    assert int(refused.value.response.headers["Retry-After"]) >= 1
    assert counted() == (before[0] + 1, before[1] + 1)
    server.engine.refuse = None
    assert client.completions.create(model="fake", prompt="x").choices[0].text
