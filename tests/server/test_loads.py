"""GET /v1/loads, GET /v1/promise and load in the headers of answers: what gateways ask."""

import json
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from roseinfer.core.outputs import PolicyStats, SchedulerStats
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState
from roseinfer.integrations import orca
from roseinfer.server import answer_shapes
from tests.router.promises import promise
from tests.server.fake_engine import INFO
from tests.server.live import LiveServer

STATS = SchedulerStats(
    running=3,
    waiting=1,
    blocks_used=25,
    blocks_total=100,
    prefix_queries=1000,
    prefix_hits=250,
    step_rows=4,
    step_duration_s=0.02,
    policy=PolicyStats(utilisation=0.4),
)
BODY = {"prompt": "x"}


@pytest.fixture
def fleet(server: LiveServer) -> Iterator[LiveServer]:
    yield server
    server.engine.fleet = None


def become(server: LiveServer, *states: EngineState, priced: bool = True) -> None:
    """Engine i has 1,000 * i prompt tokens before it."""
    server.engine.fleet = [
        EngineReport(
            i,
            state,
            EngineHealth(state is not EngineState.DEAD, 0.0),
            STATS,
            promise=promise(monotonic(), fill_tokens=1000 * i, waiting_tokens={7: 50}) if priced else None,
        )
        for i, state in enumerate(states)
    ]


def ok(server: LiveServer, path: str) -> dict[str, Any]:
    response = server.get(path)
    assert response.status_code == 200, response.text
    return response.json()


# --- loads --------------------------------------------------------------------------------------------------------
def test_loads_are_in_sglangs_words(fleet: LiveServer) -> None:
    become(fleet, EngineState.READY, EngineState.DEAD)
    answer = ok(fleet, "/v1/loads")
    answer_shapes.EngineLoads.model_validate(answer)
    assert answer["dp_rank_count"] == 2
    assert answer["loads"][0] == {
        "dp_rank": 0,
        "num_running_reqs": 3,
        "num_waiting_reqs": 1,
        "num_waiting_uncached_tokens": 50,
        "num_total_reqs": 4,
        "num_used_tokens": 25 * 16,
        "max_total_num_tokens": 1600,
        "token_usage": 0.25,
        "gen_throughput": 200.0,
        "cache_hit_rate": 0.25,
        "utilization": 0.4,
        "max_running_requests": INFO.max_num_seqs,
    }
    gone = answer["loads"][1]
    assert gone["num_running_reqs"] == gone["num_used_tokens"] == gone["gen_throughput"] == 0


def test_one_engine_has_loads_too(fleet: LiveServer) -> None:
    answer = ok(fleet, "/v1/loads?include=core")
    assert [one["dp_rank"] for one in answer["loads"]] == [0]
    assert answer["loads"][0]["num_waiting_uncached_tokens"] is None


def test_loads_of_one_of_several(fleet: LiveServer) -> None:
    become(fleet, EngineState.READY, EngineState.READY)
    answer = ok(fleet, "/v1/loads?dp_rank=1&include=core,all&format=json")
    assert answer["dp_rank_count"] == 2 and [one["dp_rank"] for one in answer["loads"]] == [1]


# --- promise ------------------------------------------------------------------------------------------------------
def test_a_promise_names_the_best_engine(fleet: LiveServer) -> None:
    become(fleet, EngineState.READY, EngineState.READY, EngineState.DRAINING)
    fleet.engine.fleet.reverse()
    answer = ok(fleet, "/v1/promise?prompt_tokens=64&ttft_ms=100&tpot_ms=30&output_tokens=10")
    answer_shapes.PromiseAnswer.model_validate(answer)
    assert [(one["engine"], one["kept"]) for one in answer["engines"]] == [(0, True), (1, False)]
    assert (answer["engine"], answer["kept"]) == (0, True)
    assert answer["predicted_ttft_ms"] == answer["engines"][0]["predicted_ttft_ms"] < 100
    assert answer["engines"][1]["predicted_ttft_ms"] > 100


def test_without_objectives_a_promise_is_a_prediction(fleet: LiveServer) -> None:
    become(fleet, EngineState.READY)
    answer = ok(fleet, "/v1/promise?prompt_tokens=64")
    assert answer["kept"] is None and answer["predicted_ttft_ms"] > 0


def test_who_knows_no_costs_promises_nothing(fleet: LiveServer) -> None:
    become(fleet, EngineState.READY, priced=False)
    answer = ok(fleet, "/v1/promise?prompt_tokens=64&ttft_ms=100")
    assert answer == {"prompt_tokens": 64, "kept": None, "engine": None, "predicted_ttft_ms": None, "engines": []}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("/v1/promise", "prompt_tokens"),
        ("/v1/promise?prompt_tokens=0", "prompt_tokens"),
        ("/v1/promise?prompt_tokens=65", "prompt_tokens"),
        ("/v1/promise?prompt_tokens=-1", "prompt_tokens"),
        ("/v1/promise?prompt_tokens=%D9%A3", "prompt_tokens"),
        ("/v1/promise?prompt_tokens=5&prompt_tokens=6", "prompt_tokens"),
        ("/v1/promise?prompt_tokens=5&ttft_ms=0", "ttft_ms"),
        ("/v1/promise?prompt_tokens=5&tpot_ms=nan", "tpot_ms"),
        ("/v1/promise?prompt_tokens=5&e2e_ms=", "e2e_ms"),
        ("/v1/promise?prompt_tokens=5&tenant=x", "tenant"),
        ("/v1/loads?dp_rank=1", "dp_rank"),
        ("/v1/loads?dp_rank=x", "dp_rank"),
        ("/v1/loads?include=core,lora", "include"),
        ("/v1/loads?format=prometheus", "format"),
        ("/v1/loads?rank=0", "rank"),
    ],
)
def test_what_is_not_understood_is_refused(server: LiveServer, query: str, param: str) -> None:
    response = server.get(query)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_number_out_of_bounds_is_named_with_them(server: LiveServer) -> None:
    message = server.get("/v1/promise?prompt_tokens=-1").json()["error"]["message"]
    assert message == "prompt_tokens must be an integer within [1, 64], got '-1'"


# --- ORCA ---------------------------------------------------------------------------------------------------------
def told(server: LiveServer, wanted: str, **body: Any) -> str:
    headers = {"endpoint-load-metrics-format": wanted}
    response = server.post("/v1/completions", BODY | body, headers=headers)
    assert response.status_code == 200, response.text
    return response.headers["endpoint-load-metrics"]


def test_answers_tell_the_load_to_who_asks(fleet: LiveServer) -> None:
    become(fleet, EngineState.READY, EngineState.READY)
    kind, body = told(fleet, "JSON").split(" ", 1)
    report = json.loads(body)
    named = report.pop("named_metrics")
    assert kind == "JSON" and named.pop("predicted_ttft_ms_1k") > 0
    assert report.pop("application_utilization") == 0.4 and set(report) <= {"rps_fractional"}
    assert named == {
        "kv_cache_usage_perc": 0.25,
        "num_requests_waiting": 2,
        "num_requests_running": 6,
        "slo_utilisation": 0.4,
    }
    text = told(fleet, "text", stream=True)
    assert text.startswith("TEXT application_utilization=0.4, ")
    assert ", named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=2, " in text


def test_nothing_is_told_of_what_nobody_knows(server: LiveServer) -> None:
    header = told(server, "JSON")
    assert "slo_utilisation" not in header and "predicted" not in header
    assert json.loads(header.removeprefix("JSON "))["application_utilization"] == 0, "of its seats"


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = orca.RateWindow()
    assert rate.per_second(100, 0.0) is None, "before there are two looks"
    assert rate.per_second(102, 0.5) is None
    assert rate.per_second(104, 1.0) == 4.0
    for second in range(2, 40):
        told = rate.per_second(100 + 7 * second, float(second))
    assert told == 7.0, "what was before the window is forgotten"
    assert rate.per_second(100 + 7 * 39 + 50, 139.0) == 0.5, "as many over a long silence"
    assert rate.per_second(5, 140.0) is None, "an engine has gone with its count"


def test_requests_a_second_are_told_of_all_engines_together() -> None:
    header = orca.LoadHeader()
    reports = [
        EngineReport(i, state, EngineHealth(True, 0.0), STATS._replace(requests=10))
        for i, state in enumerate((EngineState.READY, EngineState.DEAD))
    ]
    assert "rps_fractional" not in header.value("TEXT", reports, INFO, 5.0)
    more = [replace(report, stats=STATS._replace(requests=30)) for report in reports]
    assert ", rps_fractional=20, " in header.value("TEXT", more, INFO, 7.0)
    assert header.value("TEXT", [], None, 9.0).startswith("TEXT named_metrics."), "nobody is up"


def test_nobody_else_is_told(server: LiveServer) -> None:
    assert "endpoint-load-metrics" not in server.post("/v1/completions", BODY).headers


def test_another_format_is_refused(server: LiveServer) -> None:
    response = server.post("/v1/completions", BODY, headers={"endpoint-load-metrics-format": "BIN"})
    assert response.status_code == 400 and "TEXT or JSON" in response.json()["error"]["message"]
    assert not server.engine.requests


# --- what gateways scrape -----------------------------------------------------------------------------------------
def test_the_gauges_of_endpoint_pickers_are_there(fleet: LiveServer) -> None:
    become(fleet, EngineState.READY)
    lines = fleet.get("/metrics").text.splitlines()
    names = {line.split("{")[0] for line in lines if not line.startswith("#")}
    wanted = {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"}
    assert {f"vllm:{name}" for name in wanted} <= names
    assert {"roseinfer:slo_utilisation", "roseinfer:predicted_ttft_seconds"} <= names
    (config,) = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in config and 'num_gpu_blocks="100"' in config
