"""Scaling policy for Ray Serve: `router.fleet_size` over what engines report.

Serve calls the policy in its controller, ten times a second, with what it has collected from the engines.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from roseinfer.core.promise import Promise
from roseinfer.router.fleet_size import FleetSizeRule, FleetState, fleet_size, fullness, too_many_rejections

POLICY = "roseinfer.integrations.ray.scaling:FleetSizePolicy"
WINDOW_S = 60.0
# Metrics that an engine reports: its fullness, its waiting requests, and two of `RequestCounts` of the whole deployment
# since its start.
LOAD, WAITING, WITH_OBJECTIVES, REJECTED = "load", "waiting", "with_objectives", "rejected"
# Reports are sent every few seconds, so a larger difference from now comes from the clock of the engine's host.
MAX_CLOCK_SKEW_S = WINDOW_S


class MetricPoint(NamedTuple):
    """Value of a metric of one engine. `timestamp`: in seconds."""

    timestamp: float
    value: float


class Context(Protocol):
    """Part of Ray's `AutoscalingContext`. `raw_metrics`: points in time order, by metric and engine."""

    current_num_replicas: int
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    policy_state: dict[str, Any]
    current_time: float | None

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Iterable[MetricPoint]]] | None: ...


@dataclass(frozen=True, slots=True)
class ScalingState:
    """State between two calls.

    `running`: engines at the last call. `grown_s`: when their number last grew. `low_since_s`: since when fewer engines
    would be enough.
    """

    running: int = 0
    grown_s: float = 0.0
    low_since_s: float | None = None


def load_metrics(promise: Promise | None, now_s: float) -> dict[str, float]:
    """Return an engine's report at `now_s`, on the clock of its promises. Without a promise it is idle."""
    if promise is None:
        return {LOAD: 0.0, WAITING: 0.0}
    return {LOAD: fullness(promise, now_s), WAITING: float(promise.waiting)}


class FleetSizePolicy:
    """Ray Serve's policy. `patience_s`: how long fewer engines must have been enough before one is removed."""

    def __init__(self, patience_s: float = 600.0) -> None:
        self._patience_s = patience_s

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of engines, and the state for the next call."""
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        rule = FleetSizeRule(least, most, window_s=WINDOW_S, patience_s=self._patience_s)
        state = ScalingState(
            **{name: value for name, value in context.policy_state.items() if name in ScalingState.__slots__}
        )
        size, state = target_size(rule, context, state)
        return size, {name: getattr(state, name) for name in ScalingState.__slots__}


def target_size(rule: FleetSizeRule, context: Context, state: ScalingState) -> tuple[int, ScalingState]:
    """Return the wanted number of engines. Change nothing until the present number of engines has reported."""
    now_s = context.current_time or 0.0
    running = min(context.current_num_replicas, context.target_num_replicas)
    grown_s = now_s if running > state.running else state.grown_s
    metrics = context.raw_metrics or {}
    since_s = max(now_s - rule.window_s, grown_s)
    loads = [value for values in _since(metrics.get(LOAD, {}), since_s, now_s) for value in values]
    if not running or not loads:
        return context.target_num_replicas, ScalingState(running, grown_s, None)
    total, rejected = (_growth(_since(metrics.get(name, {}), since_s, now_s)) for name in (WITH_OBJECTIVES, REJECTED))
    starting = context.target_num_replicas - running
    waiting = sum(int(values[-1]) for values in _since(metrics.get(WAITING, {}), since_s, now_s) if values)
    fleet = FleetState(now_s, running, starting, fmean(loads), too_many_rejections(rule, total, rejected), waiting)
    size, low_since_s = fleet_size(rule, fleet, state.low_since_s)
    if size < context.target_num_replicas:
        low_since_s = None  # one at a time
    return size, ScalingState(running, grown_s, low_since_s)


def _since(engines: Mapping[Any, Iterable[MetricPoint]], since_s: float, now_s: float) -> Iterator[list[float]]:
    """Yield the values that each engine has reported since `since_s`.

    If its clock is off by more than `MAX_CLOCK_SKEW_S`, its newest report counts as a report of now.
    """
    for series in engines.values():
        points = list(series)
        skew_s = points[-1].timestamp - now_s if points else 0.0
        from_s = since_s + (skew_s if abs(skew_s) > MAX_CLOCK_SKEW_S else 0.0)
        yield [point.value for point in points if point.timestamp >= from_s]


def _growth(reports: Iterable[list[float]]) -> float:
    """Return the growth of a counter that all engines report: the largest that one of them saw."""
    return max((values[-1] - values[0] for values in reports if values), default=0.0)
