"""Traces of requests: what is in them, whose they are part of, and that they arrive."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import pytest

from roseinfer.core.outputs import DraftTally, RequestTimes
from roseinfer.core.slo import Cause, Forecast, Rejection, Why
from roseinfer.engine.api import Route
from roseinfer.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, Wait, rejected
from tests.server.live import PATIENCE_S, LiveServer, http_post, read_all
from tests.server.test_run import Process
from tests.text.tokenizers import byte_level

pytest.importorskip("opentelemetry.sdk", reason="traces need the extra 'otel'")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="traces need the extra 'otel'")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from roseinfer.integrations.otel import traces as module
from roseinfer.integrations.otel.start import traces_to
from roseinfer.integrations.otel.traces import Traces
from tests.integrations.otel.collector import Collector

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WHY = Why(((Cause.SEATS, 0.2), (Cause.STEP, 0.05)), Forecast(0.4, 0.03), chunks=2, steps=9, sat_out=1)


class Traced:
    """A server whose spans stay in this process."""

    def __init__(self, server: LiveServer, traces: Traces, exporter: InMemorySpanExporter) -> None:
        self.server = server
        self.traces = traces
        self.exporter = exporter

    def spans(self, requests: int = 1) -> list[ReadableSpan]:
        """Return and clear the spans of `requests` requests."""
        provider = self.traces.provider
        self.server.until(lambda: provider.force_flush() and self._roots() >= requests)
        found = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return sorted(found, key=lambda span: (span.context.trace_id, span.name not in PHASES, span.start_time))

    def _roots(self) -> int:
        return sum(span.name not in PHASES for span in self.exporter.get_finished_spans())

    def trace(self) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
        """The only request since the last look: its own span, and its phases by name."""
        found = self.spans()
        (root,) = [span for span in found if span.name not in PHASES]
        return root, {span.name: span for span in found if span is not root}


PHASES = ("queue", "prefill", "decode")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def module_traced(tokenizer: Tokenizer) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    with LiveServer(tokenizer, tracing=traces) as server:
        yield Traced(server, traces, exporter)


@pytest.fixture
def traced(module_traced: Traced) -> Traced:
    module_traced.server.call(module_traced.server.engine.reset)
    module_traced.server.call(module_traced.exporter.clear)
    return module_traced


def with_why(engine: FakeEngine, request: Any) -> list[Any]:
    *others, last = engine.default_script(request)
    return [*others, replace(last, why=WHY, drafts={"ngram": DraftTally(6, 4), "suffix": DraftTally(3, 0)})]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_leaves_a_span_with_what_was_asked_and_came_of_it(traced: Traced):
    engine = traced.server.engine
    engine.script = lambda request: with_why(engine, request)
    body = {
        "prompt": "a secret",
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 3,
        "stop": ["never"],
        "slo": {"ttft_ms": 60_000, "tpot_ms": 50_000},
    }
    answer = traced.server.post("/v1/completions", body, headers={"x-request-id": "mine"})
    root, children = traced.trace()
    assert answer.status_code == 200 and root.name == "text_completion fake"
    assert root.kind is SpanKind.SERVER and root.parent is None and root.status.status_code is StatusCode.UNSET
    said = dict(root.attributes or {})
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "roseinfer",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("never",),
        "gen_ai.request.stream": False,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": "fake",
        "roseinfer.api": "completions",
        "gen_ai.response.finish_reasons": (answer.json()["choices"][0]["finish_reason"],),
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer.json()["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "http.response.status_code": 200,
        "roseinfer.slo.ttft_ms": 60_000.0,
        "roseinfer.slo.tpot_ms": 50_000.0,
        "roseinfer.slo.met": True,
        "roseinfer.slo.outcome": "met",
        "roseinfer.wait.seats_ms": 200.0,
        "roseinfer.wait.step_ms": 50.0,
        "roseinfer.predicted.ttft_ms": 400.0,
        "roseinfer.predicted.tpot_ms": 30.0,
        "roseinfer.drafted_tokens": 9,
        "roseinfer.accepted_tokens": 4,
    }
    assert expected.items() <= said.items()
    assert 0 < said["gen_ai.response.time_to_first_chunk"] <= seconds(root)
    assert "error.type" not in said and "roseinfer.slo.missed" not in said
    assert children.keys() == set(PHASES)
    # As the fake engine has them.
    assert {name: round(seconds(span), 6) for name, span in children.items()} == {
        "queue": 0.25,
        "prefill": 0.25,
        "decode": 2.0,
    }
    assert all(span.parent == root.context for span in children.values())
    assert (children["queue"].attributes or {})["roseinfer.wait.seats_ms"] == 200.0
    assert (children["decode"].attributes or {})["roseinfer.sat_out"] == 1
    everything = str([span.to_json() for span in (root, *children.values())])
    assert "secret" not in everything and "hello" not in everything


def test_a_traces_parent_and_its_decision_to_sample_are_the_callers(traced: Traced):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
    headers = {"traceparent": PARENT, "tracestate": "vendor=1,other=2"}
    assert traced.server.post("/v1/chat/completions", body, headers=headers).status_code == 200
    root, children = traced.trace()
    assert root.name == "chat fake" and (root.attributes or {})["gen_ai.request.stream"] is True
    assert root.parent is not None and root.parent.is_remote
    assert f"{root.context.trace_id:032x}-{root.parent.span_id:016x}" == PARENT[3:52]
    assert root.context.trace_state.to_header() == "vendor=1,other=2"
    assert {span.context.trace_id for span in children.values()} == {root.context.trace_id}

    unsampled = {"traceparent": PARENT[:-2] + "00"}
    malformed = {"traceparent": "00-zz"}
    assert traced.server.post("/v1/chat/completions", body, headers=unsampled).status_code == 200
    assert traced.server.post("/v1/chat/completions", body, headers=malformed).status_code == 200
    root, _ = traced.trace()
    assert root.parent is None, "only the one that nobody asked not to sample, in a trace of its own"


def test_a_refused_request_says_what_stood_against_it(traced: Traced):
    refusal = Rejection("ttft", 2.5, Cause.SEATS, attainable_s=3.25)
    traced.server.engine.script = lambda request: [replace(rejected(), rejection=refusal)]
    body = {"prompt": "x", "max_tokens": 2, "slo": {"ttft_ms": 100}}
    assert traced.server.post("/v1/completions", body).status_code == 429
    root, children = traced.trace()
    expected = {
        "error.type": "slo_unattainable",
        "http.response.status_code": 429,
        "roseinfer.slo.outcome": "rejected",
        "roseinfer.slo.met": False,
        "roseinfer.refused.objective": "ttft",
        "roseinfer.refused.cause": "seats",
        "roseinfer.refused.predicted_ttft_ms": 2500.0,
        "roseinfer.refused.attainable_ms": 3250.0,
        "roseinfer.refused.hopeless": False,
        "roseinfer.why.verdict": "seats",
        "gen_ai.response.finish_reasons": ("rejected",),
    }
    assert expected.items() <= dict(root.attributes or {}).items()
    assert root.status.status_code is StatusCode.UNSET, "turning a request away is no error of the server's"
    assert str((root.attributes or {})["roseinfer.why.summary"]).startswith("Rejected: 100 ms for the first token")
    assert children.keys() == {"queue"}, "it came no further"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"prompt": "x", "max_tokens": -1}, 400, "invalid_request_error"),
        ({"prompt": "x", "model": "another"}, 404, "model_not_found"),
    ],
)
def test_what_never_became_a_job_has_a_span_of_its_own(traced: Traced, body: Any, status: int, kind: str):
    assert traced.server.post("/v1/completions", body).status_code == status
    root, children = traced.trace()
    assert root.name == "text_completion" and not children
    said = dict(root.attributes or {})
    assert (said["http.response.status_code"], said["error.type"]) == (status, kind)


def test_a_failure_is_an_error_also_behind_a_stream_that_had_begun(traced: Traced):
    engine = traced.server.engine
    engine.script = lambda request: [engine.sample(request, 0)[0], Wait(), ValueError("private words")]
    with traced.server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "max_tokens": 4, "stream": True}))
        assert connection.recv(12) == b"HTTP/1.1 200"
        traced.server.call(engine.release)
        assert b"server_error" in read_all(connection)
    root, children = traced.trace()
    assert root.status.status_code is StatusCode.ERROR
    said = dict(root.attributes or {})
    assert said["error.type"] == "ValueError" and said["http.response.status_code"] == 200
    assert said["roseinfer.slo.outcome"] == "failed" and "private" not in root.to_json()
    assert "decode" in children, "it had a token"


def test_a_client_that_leaves_is_seen_to_leave(traced: Traced):
    engine = traced.server.engine
    engine.script = lambda request: [engine.sample(request, 0)[0], Wait()]
    with traced.server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "x", "max_tokens": 4, "stream": True}))
        assert connection.recv(12) == b"HTTP/1.1 200"
    root, _ = traced.trace()
    said = dict(root.attributes or {})
    assert said["error.type"] == "client_disconnected" and said["roseinfer.slo.outcome"] == "aborted"


def test_the_way_between_engines_is_told(traced: Traced):
    traced.server.engine.route = Route(1, "prefix", retries=1, resumes=2)
    assert traced.server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    root, _ = traced.trace()
    said = {name.removeprefix("roseinfer.router."): value for name, value in (root.attributes or {}).items()}
    expected = {"engine": 1, "reason": "prefix", "retries": 1, "placed_again": 0, "resumes": 2}
    assert expected.items() <= said.items()


def test_every_choice_has_its_phases(traced: Traced):
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 2}
    assert traced.server.post("/v1/completions", body).status_code == 200
    spans = traced.spans()
    choices = [(span.attributes or {})["roseinfer.choice"] for span in spans if span.name == "decode"]
    assert sorted(choices) == [0, 1, 2, 3]


def test_phases_of_what_was_cut_short_end_when_it_did():
    from roseinfer.server.request.job import PromptRun, SampleRecord

    run = PromptRun(3, 4, 10.0, [])
    assert module.phases(run, SampleRecord(), 12.0) == [("queue", 10.0, 12.0)]
    begun = SampleRecord(tokens=1, first_s=11.0, last_s=11.5, why=WHY)
    assert module.phases(run, begun, 12.0) == [("queue", 10.0, 10.25), ("prefill", 10.25, 11.0), ("decode", 11.0, 12.0)]
    preempted = SampleRecord(times=RequestTimes(10.0, 10.5, 0.0, 11.5))
    assert module.phases(run, preempted, 12.0) == [("queue", 10.0, 10.5), ("prefill", 10.5, 11.5)]


def test_a_collector_gets_all_of_them_before_the_server_has_ended(tokenizer: Tokenizer):
    with Collector() as collector:
        with LiveServer(tokenizer, tracing=traces_to(collector.url)) as server:
            for _ in range(3):
                assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
            assert server.post("/v1/completions", {"prompt": "x", "max_tokens": -2}).status_code == 400
        names = [span.name for span in collector.spans]
    assert names.count("text_completion fake") == names.count("queue") == names.count("decode") == 3
    assert names.count("text_completion") == 1
    assert collector.resources[0]["service.name"] == "roseinfer"
    assert {"service.version", "telemetry.sdk.name"} <= collector.resources[0].keys()


def test_a_server_of_one_process_sends_its_traces(monkeypatch: pytest.MonkeyPatch):
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
        with closing(Process()) as server:
            server.ready()
            server.say("release")
            asked = {"prompt": "x", "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S).status_code == 200
            server.signal()
            assert server.end()[0] == 0
    assert "text_completion fake" in [span.name for span in collector.spans]


def test_without_a_collector_requests_are_answered_and_the_server_ends(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(module, "FLUSH_TIMEOUT_S", 0.05)
    with LiveServer(tokenizer, tracing=traces_to("http://127.0.0.1:1/v1/traces")) as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert "traces are lost: the collector did not accept them within 0.05 s" in caplog.text
