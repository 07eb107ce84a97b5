"""/metrics of several engines: a label per engine, and routing of requests between them."""

from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.outputs import PolicyStats, SchedulerStats
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState, StepRecord
from roseinfer.server.observe.exposition import Snapshot
from roseinfer.server.observe.metric_registry import MetricRegistry
from roseinfer.server.observe.model_names import ModelNames
from roseinfer.server.observe.report import Observation
from roseinfer.server.observe.routing import RoutingMetrics
from roseinfer.server.observe.step_metrics import StepMetrics
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.live import LiveServer
from tests.text.tokenizers import byte_level

WELL = EngineHealth(True, 0.25)


def report(engine: int, state: EngineState = EngineState.READY, **more: Any) -> EngineReport:
    stats = SchedulerStats(
        running=engine + 1, waiting=2, blocks_used=10, blocks_total=40 + engine, generation_tokens=100 * (engine + 1),
        policy=PolicyStats(utilisation=0.5 + engine / 10),
    )  # fmt: skip
    return EngineReport(engine, state, WELL, stats, **more)


class FakeOwner:
    def __init__(self, *reports: EngineReport) -> None:
        self.known = list(reports)
        self.listener: Any = None

    def reports(self) -> list[EngineReport]:
        return self.known

    def on_step(self, listener: Any) -> None:
        self.listener = listener


class TwoEngines(LiveServer):
    async def _start_engine(self) -> FakeEngine:
        engine = FakeEngine(self.tokenizer, INFO)
        engine.fleet = [report(0), report(1, restarts=3, deaths=2)]
        return engine


@pytest.fixture(scope="module")
def two() -> Iterator[LiveServer]:
    with TwoEngines(byte_level(), ServerConfig()) as server:
        yield server


def test_each_engine_has_its_own_series(two: LiveServer) -> None:
    text = two.get("/metrics").text
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names)), "a family is written once, with all engines"
    for name, of_both in {
        "vllm:num_requests_running": (1, 2), "vllm:num_requests_waiting": (2, 2),
        "vllm:kv_cache_usage_perc": (10 / 40, 10 / 41), "vllm:generation_tokens_total": (100, 200),
        "roseinfer:slo_utilisation": (0.5, 0.6), "roseinfer:engine_up": (1, 1),
        "roseinfer:engine_heartbeat_age_seconds": (0.25, 0.25),
        "roseinfer:engine_restarts_total": (0, 3), "roseinfer:engine_deaths_total": (0, 2),
        "roseinfer:step_time_seconds_count": (0, 0), "roseinfer:router_breakers_open": (0, 0),
    }.items():  # fmt: skip
        assert [two.metric(name, engine=str(engine)) for engine in (0, 1)] == pytest.approx(of_both), name
    assert two.metric("vllm:cache_config_info", engine="1", num_gpu_blocks="41") == 1


def test_a_dead_engine_does_not_affect_the_other(two: LiveServer) -> None:
    before = two.engine.fleet
    try:
        two.engine.fleet = [report(0), report(1, EngineState.STARTING)]
        assert [two.metric("vllm:num_requests_running", engine=str(engine)) for engine in (0, 1)] == [1, 0]
        assert [two.metric("roseinfer:engine_up", engine=str(engine)) for engine in (0, 1)] == [1, 0]
        assert two.metric("vllm:generation_tokens_total", engine="1") == 200, "counters never go back"
        states = [two.metric("roseinfer:engine_state", engine="1", state=state) for state in ("ready", "starting")]
        assert states == [0, 1]
    finally:
        two.engine.fleet = before


def test_metrics_by_request_name_no_engine(two: LiveServer) -> None:
    """A request may move between engines."""
    assert two.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    for name in (
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_count",
        "roseinfer:slo_requests_total",
    ):
        assert two.metric(name, engine="all") == 1 and two.metric(name, engine="0") == 0, name


def metric(observation: Observation, engine: FakeEngine, line: str) -> float:
    text = observation.exposition.text(observation.snapshot(), {"m": engine.info}).decode()
    return next((float(found.rsplit(" ", 1)[1]) for found in text.splitlines() if found.startswith(line)), 0.0)


def test_the_engine_owner_reports_steps_and_engines() -> None:
    observation, engine = Observation("m"), FakeEngine(byte_level(), INFO)
    engine.fleet = [report(0), report(1)]
    owner = FakeOwner(report(0), report(1, EngineState.DEAD))
    observation.models[0].set_owner(owner)
    observation.models[0].attach(engine)
    owner.listener(1, StepRecord(tokens=8, duration_s=0.5))
    owner.listener(1, StepRecord(tokens=8, duration_s=0.25))
    labels = '{engine="1",model_name="m"}'
    assert metric(observation, engine, f"roseinfer:step_time_seconds_sum{labels}") == 0.75
    assert metric(observation, engine, f"roseinfer:engine_up{labels}") == 0


def test_routing_is_counted_by_engine() -> None:
    observation, engine = Observation("m"), FakeEngine(byte_level(), INFO)
    engine.fleet = [report(0), report(1)]
    observation.models[0].attach(engine)
    routing = engine.routing
    routing.placed(1, "pace")
    routing.placed(1, "pace")
    routing.placed(0, "prefix")
    routing.retried(0)
    routing.placed_again(1, "death")
    routing.resumed(1, "death")
    for line, value in {
        'roseinfer:router_placements_total{engine="1",model_name="m",reason="pace"}': 2,
        'roseinfer:router_placements_total{engine="0",model_name="m",reason="prefix"}': 1,
        'roseinfer:router_retries_total{engine="0",model_name="m"}': 1,
        'roseinfer:router_placed_again_total{cause="death",engine="1",model_name="m"}': 1,
        'roseinfer:router_resumes_total{cause="death",engine="1",model_name="m"}': 1,
    }.items():
        assert metric(observation, engine, line) == value, line


def test_breakers_are_shown_while_they_are_open() -> None:
    observation, engine = Observation("m"), FakeEngine(byte_level(), INFO)
    engine.fleet = [report(0), report(1)]
    observation.models[0].attach(engine)
    routing = engine.routing
    line = 'roseinfer:router_breakers_open{engine="1",model_name="m"}'
    for event, shown in ((True, 1), (True, 1), (False, 0), (False, 0)):
        routing.breaker(1, event)
        assert metric(observation, engine, line) == shown


def test_how_full_an_engine_is_as_autoscaling_counts_it() -> None:
    observation, engine = Observation("m"), FakeEngine(byte_level(), INFO)
    promise = Promise(monotonic(), running=3, free_seats=1, blocks=100, free_blocks=90)
    observation.models[0].attach(engine)
    name = "roseinfer:engine_fullness"
    for state, newest, shown in (
        (EngineState.READY, promise, [0.75]),
        (EngineState.DRAINING, promise._replace(waiting=3, oldest_wait_s=9.0), [2.0]),
        (EngineState.READY, None, []),
        (EngineState.DEAD, promise, []),
    ):
        engine.fleet = [report(4, state, promise=newest)]
        text = observation.exposition.text(observation.snapshot(), {"m": INFO}).decode()
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and sample.labels == {"engine": "4", "model_name": "m"}
        ]
        assert values == pytest.approx(shown), state


def test_engines_are_shown_once_up_even_by_a_process_without_connection() -> None:
    observation = Observation("m")
    never, been = report(0, EngineState.STARTING), report(1, EngineState.STARTING, info=INFO)
    text = observation.exposition.text(Snapshot({}, [never, been]), {}).decode()
    assert 'roseinfer:engine_up{engine="1",model_name="m"} 0.0' in text and 'engine="0"' not in text


def test_a_removed_engine_has_no_series() -> None:
    """Otherwise a fleet that grows and shrinks would accumulate series."""
    registry = MetricRegistry()
    steps = StepMetrics(registry, ModelNames("m"))
    routing = RoutingMetrics(registry, "m", steps.forget)
    for engine in (1, 11):
        steps.step(engine, StepRecord(5, 0.1, predicted_s=0.1, mask_s=0.01))
        routing.engine_added(engine)
        routing.placed(engine, "pace")
        routing.resumed(engine, "death")
        routing.breaker(engine, True)
    routing.engine_removed(1)
    series = {name: {labels[1] for labels in found} for name, found in registry.numbers().items()}
    assert set(map(frozenset, series.values())) == {frozenset({"11"})} and routing.breakers == [11]
    routing.engine_added(2)
    assert registry.numbers()["roseinfer:router_resumes"][("m", "2", "death")] == [0.0]
