"""Requests that the scheduler turns away, and those whose time is over: what their clients are told, and when."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Cause, Rejection
from roseinfer.core.traits import PolicyTraits
from roseinfer.engine.api import GenerateRequest, SequenceChunk
from roseinfer.server import answer_shapes
from roseinfer.server.formats.messages import document as messages_document
from roseinfer.server.http.errors import SloUnattainable
from roseinfer.server.request.lifecycle import RequestGuard
from roseinfer.text.tokenizer import Tokenizer
from tests.server.fake_engine import INFO, Step, Wait, rejected, timed_out
from tests.server.live import PATIENCE_S, LiveServer, events, http_post, read_all

Serve = Callable[..., LiveServer]
USER = {"role": "user", "content": "x"}
SLO = {"slo": {"ttft_ms": 100, "tpot_ms": 20}}


def post(server: LiveServer, stream: bool = False, **fields: Any) -> Any:
    return server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": stream} | SLO | fields)


def refuse(server: LiveServer, *before: Step, **rejection: Any) -> None:
    server.engine.script = lambda request: [*before, rejected(**rejection)]


def counted(server: LiveServer) -> dict[str, float]:
    names = {
        "refused": ("vllm:admission_rejections_total", {"reason": "slo_unattainable"}),
        "samples": ("vllm:request_success_total", {"finished_reason": "rejected"}),
        "prompt_tokens": ("vllm:prompt_tokens_total", {}),
        "rejected": ("roseinfer:slo_requests_total", {"slo_class": "custom", "outcome": "rejected"}),
        "ttft": ("roseinfer:slo_rejections_total", {"slo_class": "custom", "reason": "ttft", "cause": "price"}),
        "timeout": ("roseinfer:slo_requests_total", {"slo_class": "custom", "outcome": "timeout"}),
        "timed_out": ("vllm:request_success_total", {"finished_reason": "timeout"}),
    }
    return {key: server.metric(name, **labels) for key, (name, labels) in names.items()}


def gained(server: LiveServer, before: dict[str, float]) -> dict[str, float]:
    return {key: value - before[key] for key, value in counted(server).items() if value != before[key]}


# --- turned away ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_in_time_gets_a_429(
    server: LiveServer, client: openai.OpenAI, stream: bool, chat: bool
) -> None:
    refuse(server)
    before = counted(server)
    options: Any = {"model": "fake", "stream": stream, "extra_body": SLO}
    with pytest.raises(openai.RateLimitError) as raised:
        if chat:
            client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **options)
        else:
            client.completions.create(prompt="x", **options)
    assert (raised.value.code, raised.value.type, raised.value.param) == ("slo_unattainable", "overloaded_error", None)
    body: Any = raised.value.body
    assert (body["reason"], body["cause"]) == ("ttft", "price")
    assert body["predicted_ttft_ms"] == 2500 and "2500.0 ms" in body["message"]
    headers = raised.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2500")
    assert headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert "x-should-retry" not in headers and headers["x-request-id"]
    answer_shapes.ErrorBody.model_validate_json(raised.value.response.content)
    assert gained(server, before) == {"refused": 1, "samples": 1, "rejected": 1, "ttft": 1}


def test_what_no_machine_could_do_is_not_worth_another_try(server: LiveServer) -> None:
    refuse(server, reason="tpot", cause=Cause.IDLE)
    answer = post(server)
    assert answer.status_code == 429 and answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["reason"], error["cause"]) == ("tpot", "idle")
    assert "TPOT objective cannot be met even on an idle server" in error["message"]


@pytest.mark.parametrize("cause", Cause)
def test_refusals_are_told_and_counted_by_cause(server: LiveServer, cause: Cause) -> None:
    refuse(server, reason="e2e", cause=cause)
    labels = {"slo_class": "custom", "reason": "e2e", "cause": cause.value}
    before = server.metric("roseinfer:slo_rejections_total", **labels)
    answer = post(server)
    assert answer.json()["error"]["cause"] == cause.value
    answer_shapes.ErrorBody.model_validate_json(answer.content)
    assert server.metric("roseinfer:slo_rejections_total", **labels) == before + 1


def test_clients_come_back_by_themselves_when_they_are_told_to(server: LiveServer) -> None:
    turns: list[str] = []

    def script(request: GenerateRequest) -> list[Step]:
        turns.append(request.request_id)
        return [rejected(predicted_s=0.001)] if len(turns) < 3 else server.engine.default_script(request)

    server.engine.script = script
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2) as patient:
        assert patient.completions.create(model="fake", prompt="x", extra_body=SLO).choices[0].text
    assert len(turns) == 3
    turns.clear()
    refuse(server, cause=Cause.IDLE)
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2) as patient,
        pytest.raises(openai.RateLimitError),
    ):
        patient.completions.create(model="fake", prompt="x", extra_body=SLO)
    assert len(server.engine.requests) == 4


@pytest.mark.parametrize(
    ("predicted_s", "seconds", "ms", "shown"),
    [
        (0.0, "1", "1000", 0.0), (1e-9, "1", "1", 0.0), (0.25, "1", "250", 250.0), (3600.0, "60", "60000", 3.6e6),
        (float("inf"), "1", "1000", None), (float("nan"), "1", "1000", None),
    ],
)  # fmt: skip
def test_when_to_come_back(predicted_s: float, seconds: str, ms: str, shown: float | None) -> None:
    error = SloUnattainable(Rejection("ttft", predicted_s))
    assert (error.headers()["Retry-After"], error.headers()["retry-after-ms"]) == (seconds, ms)
    assert json.loads(error.body())["error"]["predicted_ttft_ms"] == shown


@pytest.mark.parametrize(
    ("attainable_s", "shown"),
    [(None, None), (0.25, 250.0), (0.1000000001, 100.001), (float("inf"), None), (float("nan"), None)],
)
def test_what_could_be_kept_is_rounded_up(attainable_s: float | None, shown: float | None) -> None:
    error = SloUnattainable(Rejection("tpot", 1.0, Cause.IDLE, attainable_s))
    assert json.loads(error.body())["error"]["attainable_ms"] == shown


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_all_apis_say_what_could_be_kept(server: LiveServer, path: str) -> None:
    refuse(server, attainable_s=0.75)
    prompt: dict[str, Any] = {"prompt": "x"} if path == "completions" else {"messages": [USER]}
    if path == "responses":
        prompt = {"input": "x"}
    answer = server.post(f"/v1/{path}", {**prompt, **SLO, "max_tokens": 3} if path != "responses" else prompt | SLO)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert error.get("details", error)["attainable_ms"] == 750.0
    shape = messages_document.MessageErrorBody if path == "messages" else answer_shapes.ErrorBody
    shape.model_validate_json(answer.content)


@pytest.mark.parametrize("stream", [False, True])
def test_samples_are_turned_away_together(server: LiveServer, stream: bool) -> None:
    server.engine.script = lambda request: [rejected(index=index) for index in range(request.n)]
    before = counted(server)
    assert post(server, stream, n=3).status_code == 429
    assert gained(server, before) == {"refused": 1, "samples": 3, "rejected": 1, "ttft": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_is_turned_away_takes_the_request_with_it(server: LiveServer, stream: bool) -> None:
    """Also if another one has been answered by then: nothing of it has been sent."""
    engine = server.engine

    def script(request: GenerateRequest) -> list[Step]:
        whole = engine.default_script(request)
        return [whole, [whole[0], Wait(), *whole[1:]], [Wait(), rejected()]][len(engine.requests) - 1]

    engine.script = script
    before = counted(server)
    with server.connect() as connection:
        connection.sendall(
            http_post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 2, "stream": stream} | SLO)
        )
        server.until(lambda: len(engine.requests) == 3 and len(engine.live) == 2)
        server.call(engine.release)
        assert connection.recv(12) == b"HTTP/1.1 429"
    server.until(lambda: not engine.live)
    known = gained(server, before)
    assert known.pop("prompt_tokens") > 0
    assert known == {"refused": 1, "samples": known["samples"], "rejected": 3, "ttft": 3}


def test_a_stream_of_several_prompts_waits_until_none_can_be_turned_away(server: LiveServer) -> None:
    engine = server.engine

    def script(request: GenerateRequest) -> list[Step]:
        whole = engine.default_script(request)
        return whole if len(engine.requests) == 1 else [Wait(), *whole]

    engine.script = script
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True} | SLO))
        server.until(lambda: len(engine.requests) == 2 and len(engine.live) == 1)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(PATIENCE_S)
        server.call(engine.release)
        assert connection.recv(12) == b"HTTP/1.1 200"
    engine.reset()
    told = events(post(server, stream=True, prompt=["a", "b"], max_tokens=2).text)
    assert told[-1] == "[DONE]"
    assert [sum(len(c["choices"][0]["text"]) > 0 for c in told[:-1] if c["choices"][0]["index"] == i) for i in (0, 1)]


def test_best_effort_streams_of_several_prompts_wait_for_nobody(server: LiveServer) -> None:
    engine = server.engine
    engine.script = lambda request: (
        engine.default_script(request) if len(engine.requests) == 1 else [Wait(), *engine.default_script(request)]
    )
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True}))
        assert connection.recv(12) == b"HTTP/1.1 200"
        server.call(engine.release)


# --- comments on idle streams -----------------------------------------------------------------------------------


def first_bytes(server: LiveServer, fields: dict[str, Any], quiet_s: float = PATIENCE_S) -> bytes:
    """Return the first bytes of a stream. Its engine is silent until nothing has come for `quiet_s` seconds."""
    server.engine.script = lambda request: [Wait(), rejected()]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "stream": True} | fields))
        server.until(lambda: len(server.engine.requests) == 1)
        connection.settimeout(quiet_s)
        try:
            return connection.recv(12)
        except TimeoutError:
            connection.settimeout(PATIENCE_S)
            server.call(server.engine.release)
            return connection.recv(12)


@pytest.mark.parametrize("limit", [SLO, {"timeout_s": 50}])
def test_no_comment_before_a_possible_refusal(serve: Serve, limit: dict[str, Any]) -> None:
    server = serve(sse_keep_alive_interval=0.02)
    assert first_bytes(server, limit, 0.3) == b"HTTP/1.1 429"


def test_who_cannot_be_refused_gets_comments(serve: Serve, tokenizer: Tokenizer) -> None:
    assert first_bytes(serve(sse_keep_alive_interval=0.02), {}) == b"HTTP/1.1 200"
    live = LiveServer(tokenizer, ServerConfig(sse_keep_alive_interval=0.02))
    live.info = replace(INFO, policy=PolicyTraits("fifo"))
    with live as fifo:
        assert first_bytes(fifo, SLO) == b"HTTP/1.1 200"


def test_comments_come_once_the_stream_has_begun(serve: Serve) -> None:
    server = serve(sse_keep_alive_interval=0.02)
    engine = server.engine
    engine.script = lambda request: [engine.default_script(request)[0], Wait(), *engine.default_script(request)[1:]]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "stream": True} | SLO))
        received = b""
        while b": keep-alive" not in received:
            received += connection.recv(65536)
    server.call(engine.release)


# --- out of time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_too_late_before_the_first_token(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    server.engine.script = lambda request: [timed_out(index=i) for i in range(request.n)]
    before = counted(server)
    with pytest.raises(openai.InternalServerError) as raised:
        client.completions.create(model="fake", prompt="x", n=2, stream=stream, extra_body=SLO | {"timeout_s": 5})
    assert raised.value.status_code == 504
    assert (raised.value.code, raised.value.type) == ("deadline_exceeded", "timeout_error")
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert gained(server, before) == {"timed_out": 2, "timeout": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_too_late_in_the_middle(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    server.engine.script = lambda request: [*server.engine.default_script(request)[:2], timed_out(2)]
    before = counted(server)
    body = {"timeout_s": 5, "slo": {"ttft_ms": 1e6, "report": True}}
    options: Any = {"model": "fake", "prompt": "x", "extra_body": body}
    if stream:
        *tokens, end, usage = client.completions.create(**options, stream=True)
        text, finish, used = "".join(c.choices[0].text for c in tokens), end.choices[0].finish_reason, usage.usage
    else:
        done = client.completions.create(**options)
        text, finish, used = done.choices[0].text, done.choices[0].finish_reason, done.usage
    assert (text, finish) == ("hello world", "timeout")
    assert used is not None and used.completion_tokens == 2
    assert used.slo["met"] is False and used.slo["ttft_ms"] >= 0  # type: ignore[attr-defined]
    assert gained(server, before) == {"timed_out": 1, "timeout": 1, "prompt_tokens": 2}


def test_of_several_prompts_those_that_have_begun_are_answered(server: LiveServer) -> None:
    engine = server.engine

    def script(request: GenerateRequest) -> list[Step]:
        whole = engine.default_script(request)
        return [*whole[:2], timed_out(2)] if len(engine.requests) == 1 else [Wait(), timed_out()]

    engine.script = script
    server.call(engine.release)
    answer = post(server, prompt=["a", "b"], max_tokens=6, slo=None, timeout_s=5)
    answer_shapes.TextCompletion.model_validate_json(answer.content)
    assert [c["text"] for c in answer.json()["choices"]] == ["hello world", ""]
    assert {c["finish_reason"] for c in answer.json()["choices"]} == {"timeout"}
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_was_not_scored_in_time_has_the_probabilities_that_there_are(
    server: LiveServer, stream: bool
) -> None:
    engine = server.engine

    def script(request: GenerateRequest) -> list[Step]:
        whole = engine.default_script(request)
        if len(engine.requests) == 1:
            return [whole[0], engine.release, *whole[1:]]
        return [Wait(), replace(timed_out(), prompt_logprobs=[None])]

    engine.script = script
    answer = post(server, stream, prompt=[[5, 6], [7, 8, 9]], echo=True, logprobs=1, slo=None, timeout_s=5)
    assert answer.status_code == 200
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
        said = [event for event in events(answer.text) if event != "[DONE]"]
        choices = [c for event in said for c in event["choices"] if c["index"] == 1]
        assert choices[0]["logprobs"]["token_logprobs"] == [None, None, None]
    else:
        assert answer.json()["choices"][1]["logprobs"]["token_logprobs"] == [None, None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_time_to_live_is_over_before_the_first_token(server: LiveServer, stream: bool) -> None:
    engine = server.engine
    engine.script = lambda request: [Wait(), *engine.default_script(request)]
    answer = server.post(
        "/v1/completions", {"prompt": "x", "stream": stream}, headers={"x-llm-d-inference-ttl": "50ms"}
    )
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    assert len(engine.cancelled) == 1 and engine.requests[0].prompt.meta.deadline_s is None


@pytest.mark.parametrize("stream", [False, True])
def test_time_to_live_is_not_that_of_an_answer_that_has_begun(
    server: LiveServer, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways mean the wait by it. It is over when the test says so: a busy machine may take long to begin."""
    engine = server.engine
    begun, deadlines = threading.Event(), list[tuple[Any, ...]]()
    end_by = RequestGuard.end_by
    monkeypatch.setattr(RequestGuard, "end_by", lambda *given: deadlines.append(given))
    engine.script = lambda request: [
        engine.default_script(request)[0], begun.set, Wait(), *engine.default_script(request)[1:]
    ]  # fmt: skip
    with server.connect() as connection:
        header = "x-llm-d-inference-ttl: 50s\r\nconnection: close"
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "stream": stream}, header))
        assert begun.wait(PATIENCE_S)
        _, (guard, _, unless) = deadlines  # of the preparation, and of the run
        server.call(lambda: end_by(guard, time.monotonic() + 0.001, unless))
        server.call(lambda: asyncio.get_running_loop().call_later(0.02, engine.release))
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert not engine.cancelled


def test_other_ends_are_still_failures(server: LiveServer) -> None:
    server.engine.script = lambda request: [SequenceChunk(0, finish_reason=FinishReason.ABORT)]
    assert post(server).json()["error"]["code"] == "request_failed"
