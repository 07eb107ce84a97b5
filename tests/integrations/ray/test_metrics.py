"""One `/metrics` for all API processes of a deployment, without Ray."""

import asyncio
import copy
import pickle
from dataclasses import replace
from time import monotonic

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState
from roseinfer.integrations.ray import api
from roseinfer.integrations.ray.metrics import (
    MERGE_AFTER_S,
    DeploymentMetrics,
    deployment_snapshot,
    with_engines,
    without_clock,
)
from roseinfer.integrations.ray.register import EXPIRY_S, REGISTER_INTERVAL_S, SETTLE_S
from roseinfer.server.http.errors import ApiError
from roseinfer.server.observe.exposition import Exposition, Snapshot
from roseinfer.server.observe.metric_registry import MetricRegistry
from roseinfer.server.observe.model_names import ModelNames
from tests.integrations.ray.test_api import method
from tests.server.fake_engine import INFO


def snapshot(requests: float, generated: int = 0, breakers: tuple[int, ...] = ()) -> Snapshot:
    """Return a process's metrics: its `requests`, and one engine that has `generated` tokens as far as it knows."""
    stats = SchedulerStats(generation_tokens=generated)
    report = EngineReport(0, EngineState.READY, EngineHealth(True, 0.1), stats, promise=Promise(at_s=1.0))
    return Snapshot({"requests": {("m",): [requests]}}, [report], list(breakers))


def requests(parts: list[Snapshot] | None) -> float:
    assert parts is not None
    return deployment_snapshot(snapshot(0), parts).numbers["requests"]["m",][0]


def test_the_counts_of_ended_processes_remain() -> None:
    clock = ManualClock()
    metrics = DeploymentMetrics(clock)
    metrics.store("a", snapshot(5, breakers=(0,)))
    metrics.store("b", snapshot(7, breakers=(0,)))
    both = metrics.all()
    assert requests(both) == 12 and both is not None
    assert deployment_snapshot(snapshot(0), both).breakers == [0, 0]
    for _ in range(int((MERGE_AFTER_S + EXPIRY_S) / REGISTER_INTERVAL_S)):
        clock.advance(REGISTER_INTERVAL_S)
        metrics.store("b", snapshot(8))
        assert requests(metrics.all()) == 13
    left = metrics.all()
    assert left is not None and deployment_snapshot(snapshot(0), left).breakers == []
    assert len(left) == 2, "the ended process has no snapshot of its own any more"


def test_a_process_that_was_stopped_for_a_while_counts_once() -> None:
    clock = ManualClock()
    metrics = DeploymentMetrics(clock)
    metrics.store("a", snapshot(5))
    clock.advance(2 * EXPIRY_S)
    metrics.store("b", snapshot(1))
    metrics.store("a", snapshot(6))
    assert requests(metrics.all()) == 7


def test_counts_of_engines_do_not_depend_on_the_process_that_answers() -> None:
    clock = ManualClock()
    metrics = DeploymentMetrics(clock)
    old, young = snapshot(1, generated=1000), snapshot(1, generated=400)
    metrics.store("old", without_clock(old))
    metrics.store("young", without_clock(young))
    parts = metrics.all()
    assert parts is not None
    for own in (old, young):
        (report,) = deployment_snapshot(own, parts).engines
        assert report.stats.generation_tokens == 1000
        assert report.promise == own.engines[0].promise, "on the clock of the process that answers"
    clock.advance(EXPIRY_S + 1)
    metrics.store("young", without_clock(young))
    parts = metrics.all()
    assert parts is not None and deployment_snapshot(young, parts).engines[0].stats.generation_tokens == 400


def test_how_full_an_engine_is_does_not_depend_on_how_many_processes_there_are() -> None:
    metrics, own = DeploymentMetrics(ManualClock()), snapshot(1)
    own.engines[0] = replace(own.engines[0], info=INFO, promise=Promise(monotonic(), running=1, free_seats=1))
    for process in "abc":
        metrics.store(process, without_clock(own))
    parts = metrics.all()
    assert parts is not None
    text = Exposition(MetricRegistry(), ModelNames("m")).text(deployment_snapshot(own, parts), {}).decode()
    assert 'roseinfer:engine_fullness{engine="0",model_name="m"} 0.5' in text.splitlines()


def test_what_goes_to_another_host_has_no_times_of_this_one() -> None:
    sent = pickle.loads(pickle.dumps(without_clock(snapshot(3, generated=9))))
    assert requests([sent]) == 3
    assert [(report.info, report.promise) for report in sent.engines] == [(None, None)]
    assert with_engines(snapshot(3), None).engines == []


def test_each_process_answers_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    metrics = [DeploymentMetrics(clock)]

    class Directory:
        @staticmethod
        def exchange(process: str, own: Snapshot) -> list[Snapshot] | None:
            metrics[0].store(process, copy.deepcopy(own))
            return metrics[0].all()

        exchange_metrics = method(exchange)

    async def directory() -> type[Directory]:
        if not metrics:
            raise ConnectionError("the actor has died")
        return Directory

    monkeypatch.setattr(api, "directory", directory)

    def scrape(process: str, count: float) -> float:
        return asyncio.run(api.gather_metrics(process, snapshot(count))).numbers["requests"]["m",][0]

    assert [scrape("a", 5), scrape("b", 2), scrape("a", 6)] == [5, 7, 8]
    metrics[0] = DeploymentMetrics(clock, restarted=True)
    for process in "ab":
        with pytest.raises(ApiError) as early:
            scrape(process, 6)
        assert (early.value.status, early.value.code) == (503, "metrics_unavailable")
    clock.advance(SETTLE_S)
    assert scrape("a", 6) == 12
    metrics.clear()
    with pytest.raises(ApiError):
        scrape("a", 6)
