"""Attainment of objectives in usage, metrics and log."""

import logging
import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import EngineDeadError
from roseinfer.engine.api import GenerateRequest, SequenceChunk
from roseinfer.engine.output import merge
from roseinfer.server import answer_shapes
from roseinfer.server.observe.report import SLACK_S
from tests.server.fake_engine import Step, Wait, rejected, timed_out
from tests.server.live import LiveServer, events, http_post

TTFT_S, TPOT_S = 0.25, 0.125  # sums of such steps are exact
REPORT = {"report": True}


@pytest.fixture
def timed(server: LiveServer) -> Iterator[LiveServer]:
    """A server whose clock stands still, but for what scripts do with it: TTFT_S, then TPOT_S per token."""
    clock = ManualClock(1000.0)
    service, engine = server.service, server.engine
    real, service.clock = service.clock, clock

    def script(request: GenerateRequest) -> list[Step]:
        first, *rest = engine.default_script(request)
        steps: list[Step] = [lambda: clock.advance(TTFT_S), first]
        for chunk in rest:
            steps += [lambda: clock.advance(TPOT_S), chunk]
        return steps

    engine.script = script
    yield server
    service.clock = real


def ask(server: LiveServer, slo: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"prompt": "x", "max_tokens": 5, "slo": slo | REPORT} | fields
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200
    answer_shapes.TextCompletion.model_validate_json(answer.content)
    return answer.json()["usage"]["slo"]


SEEN = {"ttft_ms": 250.0, "tpot_ms": 125.0}


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ({}, None), ({"class": "none"}, None),
        ({"ttft_ms": 250}, True), ({"ttft_ms": 249.99}, False), ({"tpot_ms": 125}, True), ({"tpot_ms": 124}, False),
        ({"e2e_ms": 750}, True), ({"e2e_ms": 749}, False), ({"ttft_ms": 250, "tpot_ms": 125, "e2e_ms": 750}, True),
        ({"ttft_ms": 9999, "tpot_ms": 125, "e2e_ms": 1}, False),
    ],
)  # fmt: skip
def test_usage_tells_how_they_were_kept(timed: LiveServer, slo: dict[str, Any], met: bool | None) -> None:
    assert ask(timed, slo) == SEEN | {"met": met}


def test_time_per_token_is_a_mean_over_all_but_the_first(timed: LiveServer) -> None:
    assert ask(timed, {"tpot_ms": 1}, max_tokens=1) == {"ttft_ms": 250.0, "tpot_ms": 0.0, "met": True}
    assert ask(timed, {"ttft_ms": 250, "tpot_ms": 1}, max_tokens=0, echo=True)["met"] is True, "a scored prompt"


def test_tokens_that_arrive_together_divide_the_time_since_the_last_ones(timed: LiveServer) -> None:
    """5 tokens in 3 steps, as with right drafts: the 4 after the first take 2 steps."""

    def script(request: GenerateRequest) -> list[Step]:
        first, *rest = timed.engine.default_script(request)
        pairs = [merge(rest[i], rest[i + 1]) for i in (0, 2)]  # type: ignore[arg-type]
        wait = lambda: timed.service.clock.advance(TPOT_S)  # type: ignore[attr-defined]  # noqa: E731
        return [first, wait, pairs[0], wait, pairs[1]]

    def gaps() -> list[float]:
        name = "vllm:inter_token_latency_seconds"
        return [timed.metric(f"{name}_count"), timed.metric(f"{name}_sum")]

    timed.engine.script = script
    before = gaps()
    assert ask(timed, {"tpot_ms": 62.5}) == {"ttft_ms": 0.0, "tpot_ms": 62.5, "met": True}
    assert [now - then for now, then in zip(gaps(), before, strict=True)] == [4, 2 * TPOT_S]
    assert ask(timed, {"tpot_ms": 62})["met"] is False


def test_of_several_choices_the_worst_counts(timed: LiveServer) -> None:
    """Samples come in turn: each but the first waits one more TPOT_S for its first token, and n for each other."""
    assert ask(timed, {"ttft_ms": 374}, n=2) == {"ttft_ms": 375.0, "tpot_ms": 250.0, "met": False}
    assert ask(timed, {"ttft_ms": 375, "tpot_ms": 250}, n=2)["met"] is True


def test_a_stream_tells_it_in_its_usage(timed: LiveServer, client: openai.OpenAI) -> None:
    options: Any = {"model": "fake", "stream": True, "max_tokens": 5}
    slo = {"slo": {"ttft_ms": 250} | REPORT}
    *chunks, last = client.completions.create(prompt="x", extra_body=slo, **options)
    assert last.usage.slo == SEEN | {"met": True} and not last.choices
    assert not any(chunk.usage for chunk in chunks)
    messages: Any = [{"role": "user", "content": "x"}]
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = client.chat.completions.create(messages=messages, extra_body=slo, **options, **usage)
    assert last.usage.slo == SEEN | {"met": True}
    assert not any("slo" in chunk.usage.model_dump() for chunk in chunks), "it is not known before the end"


def test_who_does_not_ask_is_not_told(timed: LiveServer) -> None:
    answer = timed.post("/v1/completions", {"prompt": "x", "slo": {"ttft_ms": 5}})
    assert "slo" not in answer.json()["usage"]
    text = timed.post("/v1/completions", {"prompt": "x", "stream": True, "slo": {"ttft_ms": 5}}).text
    assert all("usage" not in event for event in events(text)[:-1])


# --- metrics and the log ----------------------------------------------------------------------------------------


def outcomes(server: LiveServer) -> dict[tuple[str, str], float]:
    """(class, outcome) -> prompts."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    samples = [s for family in families for s in family.samples if s.name == "roseinfer:slo_requests_total"]
    assert all(s.labels["model_name"] == "fake" and s.labels["engine"] == "0" for s in samples)
    return {(s.labels["slo_class"], s.labels["outcome"]): s.value for s in samples}


def new(server: LiveServer, before: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    gained = {key: value - before.get(key, 0.0) for key, value in outcomes(server).items()}
    return {key: value for key, value in gained.items() if value}


@pytest.mark.parametrize(
    ("slo", "labels"),
    [
        ({}, ("none", "met")), ({"ttft_ms": 250}, ("custom", "met")), ({"ttft_ms": 249}, ("custom", "missed_ttft")),
        ({"tpot_ms": 124}, ("custom", "missed_tpot")), ({"e2e_ms": 749}, ("custom", "missed_e2e")),
        ({"ttft_ms": 1, "tpot_ms": 1, "e2e_ms": 1}, ("custom", "missed_ttft")),
    ],
)  # fmt: skip
def test_requests_are_counted_by_what_became_of_them(
    timed: LiveServer, slo: dict[str, Any], labels: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    before = outcomes(timed)
    with caplog.at_level(logging.INFO, logger="roseinfer.server"):
        ask(timed, slo)
        timed.until(lambda: timed.service.lifecycle.requests == 0)
    assert new(timed, before) == {labels: 1.0}
    [line] = [record.getMessage() for record in caplog.records if record.name == "roseinfer.server.observe.report"]
    assert f"slo_class={labels[0]} slo={labels[1]}" in line


def test_each_prompt_counts(timed: LiveServer) -> None:
    engine, script = timed.engine, timed.engine.script
    nothing = SequenceChunk(0)
    engine.script = lambda request: [nothing] * 5 * (len(engine.requests) - 1) + script(request)
    before = outcomes(timed)
    both = {"ttft_ms": 500.0, "tpot_ms": 0.0, "met": False}
    assert ask(timed, {"ttft_ms": 300}, prompt=["a", "b"], max_tokens=1) == both
    assert new(timed, before) == {("custom", "met"): 1.0, ("custom", "missed_ttft"): 1.0}


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        ([rejected("tpot")], "rejected"), ([timed_out()], "timeout"), ([EngineDeadError("gone")], "failed"),
        ([RuntimeError("bug")], "failed"),
    ],
)  # fmt: skip
def test_whatever_ends_a_request_is_counted_for_each_prompt(server: LiveServer, steps: Any, outcome: str) -> None:
    server.engine.script = lambda request: list(steps)
    before = outcomes(server)
    answer = server.post("/v1/completions", {"prompt": ["a", "b"], "slo": {"ttft_ms": 5}})
    assert answer.status_code >= 429
    assert new(server, before) == {("custom", outcome): 2.0}


@pytest.mark.parametrize(("error", "traced"), [(RuntimeError("bug"), True), (EngineDeadError("gone"), False)])
def test_the_log_has_the_traceback_of_a_bug(
    server: LiveServer, error: Exception, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.script = lambda request: [error]
    with caplog.at_level(logging.ERROR, logger="roseinfer.server"):
        assert server.post("/v1/completions", {"prompt": "a"}).status_code >= 500
        server.until(lambda: server.service.lifecycle.requests == 0)
    [line] = [record for record in caplog.records if record.name == "roseinfer.server.observe.report"]
    assert line.levelname == "ERROR" and f"why='{type(error).__name__}: {error}'" in line.getMessage()
    assert (line.exc_info is not None and line.exc_info[1] is error) == traced
    assert (line.process, line.module, line.funcName) == (os.getpid(), "request_log", "log_end")


def test_clients_that_leave_are_counted_apart(server: LiveServer) -> None:
    server.engine.script = lambda request: [Wait()]
    before = outcomes(server)
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "slo": {"ttft_ms": 5}}))
        server.until(lambda: len(server.engine.requests) == 1)
    server.until(lambda: server.service.lifecycle.requests == 0)
    assert new(server, before) == {("custom", "aborted"): 1.0}


def test_wrong_requests_are_not_counted(server: LiveServer) -> None:
    before = outcomes(server)
    assert server.post("/v1/completions", {"prompt": [1] * 64, "slo": {"ttft_ms": 5}}).status_code == 400
    assert new(server, before) == {}


def test_slack_is_what_was_left_and_may_be_negative(timed: LiveServer) -> None:
    def count(objective: str, bound: str) -> float:
        name = "roseinfer:slo_slack_seconds_bucket"
        return timed.metric(name, slo_class="custom", objective=objective, le=bound)

    bounds = ("-0.25", "-0.1", "0.0", "0.1", "+Inf")
    before = {o: [count(o, b) for b in bounds] for o in ("ttft", "tpot", "e2e")}
    ask(timed, {"ttft_ms": 100, "tpot_ms": 130})  # late by 150 ms; 5 ms left
    gained = {o: [count(o, b) - n for b, n in zip(bounds, before[o], strict=True)] for o in before}
    assert gained == {"ttft": [0, 1, 1, 1, 1], "tpot": [0, 0, 0, 1, 1], "e2e": [0, 0, 0, 0, 0]}
    assert list(SLACK_S) == sorted(SLACK_S) and len(set(SLACK_S)) == len(SLACK_S)


def test_what_clients_write_is_no_label(server: LiveServer) -> None:
    for slo in ({"ttft_ms": 1e6}, {"tpot_ms": 5e5}, {"class": "attack"}, {}):
        server.post(
            "/v1/completions",
            {"prompt": "x", "slo": slo, "service_tier": "attack"},
            headers={"x-llm-d-inference-fairness-id": "attack"},
        )
    assert {name for name, _ in outcomes(server)} <= {"custom", "none"}
    assert "attack" not in server.get("/metrics").text
