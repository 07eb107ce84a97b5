"""/metrics: names, labels and values."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from roseinfer.core.errors import TooManyInflightError
from roseinfer.core.outputs import (
    AdapterStats,
    DraftStats,
    DraftTally,
    GuideStats,
    OffloadStats,
    PolicyStats,
    SchedulerStats,
    StateStats,
)
from roseinfer.core.slo import Cause, Why
from roseinfer.engine.api import Route, StepRecord
from roseinfer.server.observe.metrics import REQUEST_S, TOKEN_S, TTFT_S, length_buckets
from tests.server.fake_engine import Wait
from tests.server.live import LiveServer, http_post

ROUTE = {"handler": "/v1/completions", "method": "POST"}
LABELS = {"model_name": "fake", "engine": "0"}
DASHBOARD = {
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum", "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_params_max_tokens_sum", "vllm:request_params_n_sum", "vllm:request_inference_time_seconds_sum",
    "vllm:request_time_per_output_token_seconds_sum", "vllm:cache_config_info", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:prompt_tokens_cached_total",
    "vllm:request_prefill_kv_computed_tokens_sum", "vllm:request_num_preemptions_sum",
    "vllm:iteration_tokens_total_sum", "roseinfer:step_time_seconds_sum", "roseinfer:engine_heartbeat_age_seconds",
    "roseinfer:startup_phase_seconds", "http_requests_total", "http_request_duration_seconds_sum",
}  # fmt: skip


def test_every_name_of_the_dashboard_is_there(server: LiveServer) -> None:
    server.post("/v1/completions", {"prompt": "x"})
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    samples = [sample for family in families for sample in family.samples]
    assert not DASHBOARD - {sample.name for sample in samples}
    for sample in samples:
        if sample.name.startswith(("vllm:", "roseinfer:")):
            assert sample.labels["model_name"] == "fake", sample


def test_wait_times_are_summed_by_cause(server: LiveServer) -> None:
    def script(request: Any) -> list[Any]:
        *others, last = server.engine.default_script(request)
        return [*others, replace(last, why=Why(((Cause.SEATS, 0.5), (Cause.STEP, 0.25))))]

    def waited() -> list[float]:
        return [server.metric("roseinfer:request_wait_seconds_total", cause=cause) for cause in ("seats", "step")]

    server.engine.script = script
    before = waited()
    server.post("/v1/completions", {"prompt": ["x", "y"]})
    assert [now - then for now, then in zip(waited(), before, strict=True)] == [1.0, 0.5]


@pytest.mark.parametrize(("resumes", "seconds"), [(0, 2.0), (1, 0.0)])
def test_time_on_a_lost_engine_is_no_wait(server: LiveServer, resumes: int, seconds: float) -> None:
    def script(request: Any) -> list[Any]:
        *others, last = server.engine.default_script(request)
        return [*others, replace(last, why=Why(((Cause.ENGINE, 2.0),)))]

    server.engine.script, server.engine.route = script, Route(1, "prefix", resumes=resumes)
    before = server.metric("roseinfer:request_wait_seconds_total", cause="engine")
    server.post("/v1/completions", {"prompt": "x"})
    assert server.metric("roseinfer:request_wait_seconds_total", cause="engine") - before == seconds


def test_head_and_content_type(server: LiveServer) -> None:
    with server.client() as client:
        got, head = client.get("/metrics"), client.head("/metrics")
    assert got.headers["content-type"] == head.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert head.status_code == 200 and head.content == b""


def test_engine_numbers_are_read_when_scraped(server: LiveServer) -> None:
    server.engine.snapshot = SchedulerStats(
        running=3, waiting=4, blocks_used=25, blocks_total=100, prefix_queries=50, prefix_hits=20, preemptions=2,
        prompt_tokens=70, generation_tokens=90, policy_stalls=5, policy_faults=6, integrity_errors=7,
        guides=GuideStats(compiled=8, cached=9, rows=11, dormant_rows=10, too_slow=14, grammars=12, waiting=13),
    )  # fmt: skip
    for name, value in {
        "vllm:num_requests_running": 3, "vllm:num_requests_waiting": 4, "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 50, "vllm:prefix_cache_hits_total": 20, "vllm:num_preemptions_total": 2,
        "roseinfer:prefill_tokens_total": 70, "vllm:generation_tokens_total": 90,
        "roseinfer:policy_stalls_total": 5, "roseinfer:policy_faults_total": 6,
        "roseinfer:integrity_errors_total": 7, "roseinfer:engine_grammars_compiled_total": 8,
        "roseinfer:engine_grammars_cached_total": 9, "roseinfer:dormant_rows_total": 10,
        "roseinfer:constraints_too_slow_total": 14,
        "roseinfer:constrained_rows_total": 11, "roseinfer:engine_grammars": 12,
        "roseinfer:num_requests_compiling": 13,
    }.items():  # fmt: skip
        assert server.metric(name, **LABELS) == value, name
    assert server.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert server.metric("roseinfer:startup_phase_seconds", phase="load") == 0.5
    assert server.metric("roseinfer:ranks") == 1


def test_drafts_by_proposer_and_position_and_under_the_names_of_vllm(server: LiveServer) -> None:
    assert "spec_" not in server.get("/metrics").text
    drafts = (DraftStats("ngram", 5, (5, 4), (3, 1)), DraftStats("suffix", 2, (2, 2, 2), (2, 2, 1)))
    server.engine.snapshot = SchedulerStats(drafts=drafts)
    for name, proposer, values in (
        ("steps", "ngram", [5]), ("drafted_tokens", "ngram", [5, 4]), ("accepted_tokens", "ngram", [3, 1]),
        ("steps", "suffix", [2]), ("drafted_tokens", "suffix", [2, 2, 2]), ("accepted_tokens", "suffix", [2, 2, 1]),
    ):  # fmt: skip
        at = [{}] if name == "steps" else [{"position": str(position)} for position in range(len(values))]
        found = [server.metric(f"roseinfer:spec_{name}_total", proposer=proposer, **LABELS, **more) for more in at]
        assert found == values, (name, proposer)
    assert server.metric("vllm:spec_decode_num_drafts_total", **LABELS) == 7
    assert server.metric("vllm:spec_decode_num_draft_tokens_total", **LABELS) == 15
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total", **LABELS) == 9
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [server.metric(name, position=str(position)) for position in range(4)] == [5, 3, 1, 0]


def test_host_memory_metrics(server: LiveServer) -> None:
    server.engine.snapshot = SchedulerStats()
    assert "offload" not in server.get("/metrics").text, "an engine without host memory"
    server.engine.snapshot = SchedulerStats(offload=OffloadStats(25, 100, 1, 70, 60, 5, 6, 0.25, 0.5))
    for name, value in {
        "vllm:kv_offload_cpu_cache_usage_perc": 0.25, "roseinfer:num_requests_loading": 1,
        "vllm:external_prefix_cache_queries_total": 70, "vllm:external_prefix_cache_hits_total": 60,
    }.items():  # fmt: skip
        assert server.metric(name, **LABELS) == value, name
    for name, way, blocks, seconds in (("load", "CPU_to_GPU", 5, 0.25), ("store", "GPU_to_CPU", 6, 0.5)):
        assert server.metric("roseinfer:kv_offload_blocks_total", transfer_type=way, **LABELS) == blocks
        assert (
            server.metric(f"vllm:kv_offload_{name}_bytes_total", **LABELS)
            == blocks * server.engine.info.facts.block_bytes
        )
        assert server.metric(f"vllm:kv_offload_{name}_time_total", **LABELS) == seconds


def test_metrics_of_recurrent_states(server: LiveServer) -> None:
    server.engine.snapshot = SchedulerStats()
    assert "roseinfer:state_" not in server.get("/metrics").text, "a model without states"
    server.engine.snapshot = SchedulerStats(states=StateStats(3, 12, 5, 40, 2))
    for name, value in {
        "roseinfer:state_slots_usage_perc": 0.25, "roseinfer:state_snapshots": 5,
        "roseinfer:state_snapshots_taken_total": 40, "roseinfer:state_snapshots_skipped_total": 2,
    }.items():  # fmt: skip
        assert server.metric(name, **LABELS) == value, name
    assert "roseinfer:state_offload" not in server.get("/metrics").text, "no host memory"
    server.engine.snapshot = SchedulerStats(states=StateStats(3, 12, 5, 40, 2, 6, 24, 7, 9))
    assert server.metric("roseinfer:state_host_slots_usage_perc", **LABELS) == 0.25
    for direction, count in (("CPU_to_GPU", 7), ("GPU_to_CPU", 9)):
        assert server.metric("roseinfer:state_offload_snapshots_total", transfer_type=direction, **LABELS) == count


def test_metrics_of_adapters(server: LiveServer) -> None:
    server.engine.snapshot = SchedulerStats()
    assert "adapter" not in server.get("/metrics").text, "an engine without slots for adapters"
    server.engine.snapshot = SchedulerStats(adapters=AdapterStats(2, 8, 1000, 3, 40, 32, 25, 5, 1.5))
    for name, value in {
        "roseinfer:adapter_slots_usage_perc": 0.25, "roseinfer:adapter_host_bytes": 1000,
        "roseinfer:num_requests_waiting_for_adapter": 3, "roseinfer:adapter_loads_total": 40,
        "roseinfer:adapter_evictions_total": 32, "roseinfer:adapter_read_seconds_total": 1.5,
    }.items():  # fmt: skip
        assert server.metric(name, **LABELS) == value, name
    for result, value in (("read", 20), ("failed", 5)):
        assert server.metric("roseinfer:adapter_reads_total", result=result, **LABELS) == value


def test_steps(server: LiveServer) -> None:
    before = server.metric("vllm:iteration_tokens_total_count")
    server.call(lambda: server.engine.step(StepRecord(tokens=100, duration_s=0.5)))
    assert server.metric("vllm:iteration_tokens_total_count") == before + 1
    assert server.metric("vllm:iteration_tokens_total_sum") >= 100
    assert server.metric("roseinfer:step_time_seconds_sum") >= 0.5


def test_predicted_against_measured_step_times(server: LiveServer) -> None:
    """Only predicted steps count."""

    def numbers() -> list[float]:
        ratio = "roseinfer:step_time_ratio"
        at_most = [server.metric(f"{ratio}_bucket", le=bound) for bound in ("0.95", "1.05", "1.25")]
        return [*at_most, server.metric(f"{ratio}_count"), server.metric(f"{ratio}_sum")]

    before = numbers()
    for measured, predicted in ((0.9, 1.0), (0.012, 0.010), (5.0, 0.0)):
        server.call(lambda: server.engine.step(StepRecord(1, measured, predicted)))  # noqa: B023
    assert [now - was for now, was in zip(numbers(), before, strict=True)] == [1, 1, 2, 2, pytest.approx(2.1)]


def test_mask_time_counts_steps_with_masks_only(server: LiveServer) -> None:
    before = server.metric("roseinfer:mask_time_seconds_count")
    for mask_s in (0.0002, 0.0):
        server.call(lambda: server.engine.step(StepRecord(1, 0.01, 0.0, mask_s)))  # noqa: B023
    assert server.metric("roseinfer:mask_time_seconds_count") == before + 1


SLO_GAUGES = ("utilisation", "speed_ratio", "margin", "step_budget_seconds", "virtual_batch_size", "demoted_requests")


def test_policy_figures_are_shown_if_reported(server: LiveServer) -> None:
    def shown(stats: PolicyStats | None) -> dict[str, float]:
        server.engine.snapshot = SchedulerStats(policy=stats)
        families = text_string_to_metric_families(server.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        values = {sample.name: sample.value for sample in samples if sample.labels == LABELS}
        return {name: values[f"roseinfer:slo_{name}"] for name in SLO_GAUGES if f"roseinfer:slo_{name}" in values}

    values = (0.75, 1.08, 0.02, 0.03, 11 / 6, 3)
    assert shown(PolicyStats(*values)) == dict(zip(SLO_GAUGES, values, strict=True))
    assert shown(PolicyStats(utilisation=0.0, demoted=0)) == {"utilisation": 0, "demoted_requests": 0}
    assert shown(None) == {}


def deltas(server: LiveServer, names: list[str], **body: object) -> list[float]:
    before = [server.metric(name) for name in names]
    assert server.post("/v1/completions", {"prompt": "hello world"} | body).status_code == 200
    return [server.metric(name) - value for name, value in zip(names, before, strict=True)]


def test_a_request_leaves_its_lengths_and_times(server: LiveServer) -> None:
    """Expected values follow `fake_engine.TIMES`."""
    expected = {
        "vllm:prompt_tokens_total": 3,
        "vllm:request_prompt_tokens_sum": 3,
        "vllm:request_generation_tokens_sum": 3,
        "vllm:request_max_num_generation_tokens_sum": 3,
        "vllm:request_params_max_tokens_sum": 3,
        "vllm:request_params_n_sum": 1,
        "vllm:request_num_preemptions_sum": 1,
        "vllm:request_prefill_kv_computed_tokens_sum": 3,
        "vllm:request_queue_time_seconds_sum": 0.25,
        "vllm:request_prefill_time_seconds_sum": 0.25,
        "vllm:request_decode_time_seconds_sum": 2.0,
        "vllm:request_inference_time_seconds_sum": 2.25,
        "vllm:request_time_per_output_token_seconds_sum": 1.0,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 2,
    }
    assert deltas(server, list(expected), max_tokens=3) == pytest.approx(list(expected.values()))


def test_samples_and_prompts(server: LiveServer) -> None:
    names = ["params_n_sum", "generation_tokens_count", "prompt_tokens_count", "max_num_generation_tokens_sum"]
    names = [f"vllm:request_{name}" for name in names] + ["vllm:prompt_tokens_total"]
    assert deltas(server, names, prompt=["a", "b"], n=3, max_tokens=2) == [6, 6, 2, 4, 4]


def test_finish_reasons(server: LiveServer) -> None:
    for max_tokens, reason in ((1, "length"), (50, "stop")):
        before = server.metric("vllm:request_success_total", finished_reason=reason)
        server.post("/v1/completions", {"prompt": "x", "max_tokens": max_tokens})
        assert server.metric("vllm:request_success_total", finished_reason=reason) == before + 1


def test_http_answers_by_route(server: LiveServer) -> None:
    def count(**labels: str) -> float:
        return server.metric("http_requests_total", **labels)

    cases = [
        (ROUTE | {"status": "2xx"}, lambda: server.post("/v1/completions", {"prompt": "x"})),
        (ROUTE | {"status": "4xx"}, lambda: server.post("/v1/completions", {})),
        ({"handler": "/v1/models/{model_id}", "method": "GET"}, lambda: server.get("/v1/models/fake")),
        ({"handler": "/v1/requests/{request_id}", "method": "GET"}, lambda: server.get("/v1/requests/secret")),
        ({"handler": "none", "method": "OTHER", "status": "4xx"}, lambda: server.get("/secret/path")),
        ({"handler": "/metrics", "method": "OTHER", "status": "4xx"}, lambda: server.post("/metrics", {})),
    ]
    for labels, request in cases:
        before = count(**labels)
        request()
        assert count(**labels) == before + 1
    assert "secret" not in server.get("/metrics").text


def test_unknown_paths_and_methods_add_no_series(server: LiveServer) -> None:
    def series() -> int:
        return server.get("/metrics").text.count("http_requests_total{")

    def ask_for_everything(word: str) -> None:
        methods = ["GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "MKCOL"]
        for path in ("/v1/completions", "/metrics", "/health", f"/{word}", f"/v1/models/{word}"):
            for method in methods:
                client.request(method, path)

    with server.client() as client:
        ask_for_everything("one")
        before = series()
        for word in ("two", "three"):
            ask_for_everything(word)
        assert series() == before < 30


def test_a_dead_engine_runs_nothing(server: LiveServer) -> None:
    server.engine.snapshot = SchedulerStats(
        running=3,
        waiting=4,
        blocks_used=25,
        blocks_total=100,
        generation_tokens=90,
        policy=PolicyStats(utilisation=0.5),
    )
    gauges = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
    assert [server.metric(name) for name in ("roseinfer:engine_up", *gauges)] == [1, 3, 4, 0.25]
    server.engine.alive = False
    assert [server.metric(name) for name in ("roseinfer:engine_up", *gauges)] == [0, 0, 0, 0]
    assert server.metric("vllm:generation_tokens_total") == 90, "counters never go back"
    assert "slo_utilisation" not in server.get("/metrics").text


def test_a_client_that_leaves_during_preparation_is_counted(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*args: Any) -> None:
        await asyncio.Event().wait()

    def aborted() -> float:
        return server.metric("roseinfer:requests_aborted_total", reason="disconnect")

    before, asked = aborted(), len(server.engine.requests)
    monkeypatch.setattr(server.service.texts, "perform", never)
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", {"prompt": "a"}))
        server.until(lambda: server.service.lifecycle.requests == 1)
    server.until(lambda: server.service.lifecycle.requests == 0)
    assert aborted() == before + 1 and len(server.engine.requests) == asked


def test_every_prompt_counts_when_the_engine_rejects_some(server: LiveServer) -> None:
    submit = server.engine.submit

    def one_only(request: Any, sink: Any) -> Any:
        if len(server.engine.requests) > before_requests:
            raise TooManyInflightError("full")
        return submit(request, sink)

    before_requests = len(server.engine.requests)
    server.engine.script = lambda request: [Wait()]
    before = server.metric("vllm:request_success_total", finished_reason="rejected")
    server.engine.submit = one_only  # type: ignore[method-assign]
    try:
        assert server.post("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}).status_code == 429
    finally:
        del server.engine.submit
    assert server.metric("vllm:request_success_total", finished_reason="rejected") == before + 6


def test_buckets_keep_every_bound_of_vllm() -> None:
    assert list(TTFT_S) == sorted(TTFT_S) and list(TOKEN_S) == sorted(TOKEN_S) and list(REQUEST_S) == sorted(REQUEST_S)
    assert {0.06, 0.25, 7.5, 160, 2560} <= set(TTFT_S)
    assert {0.01, 0.075, 0.3, 80} <= set(TOKEN_S)
    assert {0.3, 0.8, 2.5, 1920, 7680} <= set(REQUEST_S)
    assert length_buckets(64) == [1, 2, 5, 10, 20, 50]
    assert length_buckets(1000)[-1] == 1000 and length_buckets(1) == [1]


def test_one_log_line_per_request(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="roseinfer.server"):
        server.post("/v1/completions", {"prompt": "hello world", "max_tokens": 3}, headers={"X-Request-Id": "mine"})
        server.until(lambda: server.service.lifecycle.requests == 0)
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("roseinfer.server")]
    for part in (
        "request=mine",
        "api=completions",
        "finish=length",
        "prompt_tokens=3",
        "output_tokens=3",
        "queue_ms=250.0",
        "slo=met",
    ):
        assert part in line.split()
    assert "ttft_ms=" in line
    assert "hello" not in line


@pytest.mark.parametrize("n", [1, 2])
def test_the_log_line_counts_the_drafts_of_all_choices(
    server: LiveServer, caplog: pytest.LogCaptureFixture, n: int
) -> None:
    def script(request: Any) -> list[Any]:
        *others, last = server.engine.default_script(request)
        return [*others, replace(last, drafts={"ngram": DraftTally(5, 3), "suffix": DraftTally(1, 0)})]

    server.engine.script = script
    with caplog.at_level(logging.INFO, logger="roseinfer.server"):
        server.post("/v1/completions", {"prompt": ["x"] * n, "max_tokens": 3})
        server.until(lambda: server.service.lifecycle.requests == 0)
    [line] = [record.getMessage() for record in caplog.records if "request ended" in record.msg.event]
    assert f"drafted_tokens={6 * n} accepted_tokens={3 * n}" in line
