"""Scaling policy for Ray Serve: `router.fleet_size` over what engines report.

Serve calls the policy in its controller, ten times a second, with what it has collected from the engines.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from roseinfer.router.fleet_size import FleetSizeRule, FleetState, fleet_size, too_many_rejections

POLICY = "roseinfer.integrations.ray.scaling:FleetSize"
WINDOW_S = 60.0  # which is looked at
# What an engine reports: how full it is, and of the requests of all engines, ever, those that had objectives and those
# of them that were refused though an idle engine would have kept them.
USED, PROMISED, REFUSED = "u", "promised", "refused"
# Reports are sent every few seconds: one that is further from now than this is not old, or early.
SKEW_S = WINDOW_S


class Point(NamedTuple):
    """A figure of an engine, at a time in seconds."""

    timestamp: float
    value: float


class Context(Protocol):
    """Part of Ray's `AutoscalingContext`. `raw_metrics`: by name and engine, points in time order."""

    current_num_replicas: int
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    policy_state: dict[str, Any]
    current_time: float | None

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Iterable[Point]]] | None: ...


@dataclass(frozen=True, slots=True)
class ScalingState:
    """Between two calls. `running`: engines at the last one; `grown_s`: when they were last fewer; `calm_s`: since when
    fewer would do.
    """

    running: int = 0
    grown_s: float = 0.0
    calm_s: float | None = None


class FleetSize:
    """Ray Serve's policy. `patience_s`: how long the others must have been enough before an engine goes."""

    def __init__(self, patience_s: float = 600.0) -> None:
        self._patience_s = patience_s

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Return the number of engines there should be, and the state for the next call."""
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        rule = FleetSizeRule(least, most, window_s=WINDOW_S, patience_s=self._patience_s)
        state = ScalingState(
            **{name: value for name, value in context.policy_state.items() if name in ScalingState.__slots__}
        )
        size, state = wanted(rule, context, state)
        return size, {name: getattr(state, name) for name in ScalingState.__slots__}


def wanted(rule: FleetSizeRule, context: Context, state: ScalingState) -> tuple[int, ScalingState]:
    """Return how many engines there should be. Change nothing until the present number of engines has reported."""
    now_s = context.current_time or 0.0
    running = min(context.current_num_replicas, context.target_num_replicas)
    grown_s = now_s if running > state.running else state.grown_s
    metrics = context.raw_metrics or {}
    since_s = max(now_s - rule.window_s, grown_s)
    used = [value for values in _since(metrics.get(USED, {}), since_s, now_s) for value in values]
    if not running or not used:
        return context.target_num_replicas, ScalingState(running, grown_s, None)
    promised, refused = (_growth(_since(metrics.get(name, {}), since_s, now_s)) for name in (PROMISED, REFUSED))
    seen = FleetState(
        now_s, running, context.target_num_replicas - running, fmean(used), too_many_rejections(rule, promised, refused)
    )
    size, calm_s = fleet_size(rule, seen, state.calm_s)
    if size < context.target_num_replicas:
        calm_s = None  # one at a time
    return size, ScalingState(running, grown_s, calm_s)


def _since(engines: Mapping[Any, Iterable[Point]], since_s: float, now_s: float) -> Iterator[list[float]]:
    """Yield what each engine has reported since then. If its clock is off by more than `SKEW_S`, its newest report
    counts as one of now.
    """
    for series in engines.values():
        points = list(series)
        off_s = points[-1].timestamp - now_s if points else 0.0
        from_s = since_s + (off_s if abs(off_s) > SKEW_S else 0.0)
        yield [point.value for point in points if point.timestamp >= from_s]


def _growth(reports: Iterable[list[float]]) -> float:
    """Return the growth of a counter that all engines report, by the one that saw most of it."""
    return max((values[-1] - values[0] for values in reports if values), default=0.0)
