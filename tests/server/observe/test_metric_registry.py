"""Counters and histograms of one process, and summed over several."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from roseinfer.core.outputs import PolicyStats, SchedulerStats
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState
from roseinfer.server.observe.exposition import Snapshot, combined
from roseinfer.server.observe.metric_registry import MetricRegistry, total
from tests.server.fake_engine import INFO

BOUNDS = (0.01, 0.5, 1, 2.5)
VALUES = (0.0, 0.01, 0.011, 0.5, 0.7, 1.0, 2.5, 2.6, 100.0)


class _Collected:
    def __init__(self, registry: MetricRegistry) -> None:
        self.collect = lambda: registry.metrics(registry.numbers())


def test_the_text_equals_the_official_clients() -> None:
    official, registry = CollectorRegistry(), MetricRegistry()
    theirs = Histogram("h", "some help", ["a"], buckets=BOUNDS, registry=official).labels("x")
    count = Counter("c", "count", ["a", "b"], registry=official)
    ours = registry.histograms("h", "some help", BOUNDS, ("a",)).labels("x")
    counts = registry.counters("c", "count", ("a", "b"))
    for value in VALUES:
        theirs.observe(value)
        ours.observe(value)
    for labels in (("1", "2"), ("1", "3"), ("1", "2")):
        count.labels(*labels).inc(2)
        counts.labels(*labels).inc(2)

    def lines(text: bytes) -> list[str]:
        kept = (line for line in text.decode().splitlines() if "_created" not in line)
        return sorted(kept)

    assert lines(generate_latest(_Collected(registry))) == lines(generate_latest(official))


def test_observing_several_at_once_equals_one_by_one() -> None:
    one_by_one, together = (MetricRegistry().histograms("h", "", BOUNDS, ()).labels() for _ in range(2))
    for _ in range(3):
        one_by_one.observe(0.7)
    together.observe(0.7, 3)
    assert together.numbers == pytest.approx(one_by_one.numbers)


def test_models_share_a_metric_that_is_declared_alike() -> None:
    registry = MetricRegistry()
    for model in ("a", "b"):
        registry.counters("c", "help", ("model",)).labels(model).inc()
    assert registry.numbers() == {"c": {("a",): [1.0], ("b",): [1.0]}}
    with pytest.raises(AssertionError, match="twice"):
        registry.counters("c", "help", ("model", "engine"))


def counted(**counts: float) -> MetricRegistry:
    registry = MetricRegistry()
    counters = registry.counters("c", "", ("kind",))
    for kind, count in counts.items():
        counters.labels(kind).inc(count)
    registry.histograms("h", "", BOUNDS, ()).labels().observe(0.7)
    return registry


def test_sums_include_series_of_one_process_only() -> None:
    parts = [counted(a=1, b=2).numbers(), counted(b=3).numbers(), {}, {"other": {(): [1.0]}}]
    summed = total(parts)
    assert summed["c"] == {("a",): [1], ("b",): [5]}
    assert summed["h"] == {(): [0, 0, 2, 0, 0, pytest.approx(1.4)]}
    assert summed["other"] == {(): [1.0]}
    assert parts[0]["c"] == {("a",): [1], ("b",): [2]}, "the parts stay as they are"


def report(running: int, policy: PolicyStats | None = None) -> EngineReport:
    stats = SchedulerStats(step=7, running=running, policy=policy)
    return EngineReport(1, EngineState.QUIET, EngineHealth(True, 0.1), stats, restarts=2, deaths=1, info=INFO)


def test_combined_snapshots_have_the_engines_of_their_owner() -> None:
    figures = PolicyStats(utilisation=0.5, demoted=2, predicted_step_s=0.01)
    owner = Snapshot(counted(a=2).numbers(), [report(1, figures)])
    parts = (Snapshot({}), owner, Snapshot(counted(a=1).numbers(), [report(9)], [1]), Snapshot({}, [], [0, 1]))
    both = combined([msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=Snapshot) for part in parts])
    assert both.numbers["c"] == {("a",): [3.0]}
    assert both.engines == owner.engines and both.breakers == [0, 1, 1]
