"""Ray Serve's policy for the number of engines."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from roseinfer.core.promise import Promise
from roseinfer.integrations.ray.scaling import (
    LOAD,
    REJECTED,
    WAITING,
    WITH_OBJECTIVES,
    FleetSizePolicy,
    MetricPoint,
    load_metrics,
)


@dataclass
class Context:
    """Context of Serve in which all engines report the same. `requests`, `rejected`: counts of the last 20 s.

    `waiting`: requests that wait in each engine.
    """

    current_num_replicas: int
    target_num_replicas: int
    current_time: float
    load: float
    requests: float = 0.0
    rejected: float = 0.0
    waiting: float = 0.0
    reported_s: float | None = None
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4
    policy_state: dict[str, Any] = field(default_factory=dict)

    @property
    def raw_metrics(self) -> dict[str, dict[str, list[MetricPoint]]]:
        at_s = self.current_time if self.reported_s is None else self.reported_s
        counters = {WITH_OBJECTIVES: (7000.0, self.requests), REJECTED: (50.0, self.rejected)}
        found = {
            name: [MetricPoint(at_s - 20.0, before), MetricPoint(at_s, before + more)]
            for name, (before, more) in counters.items()
        }
        found[WAITING] = [MetricPoint(at_s, self.waiting)]
        found[LOAD] = [MetricPoint(at_s, self.load)]
        engines = [f"engine{number}" for number in range(self.current_num_replicas)]
        return {name: dict.fromkeys(engines, points) for name, points in found.items()}


GROWN = {"running": 2, "grown_s": 0.0}  # long ago


def sizes(policy: FleetSizePolicy, *contexts: Context, before: dict[str, Any] | None = None) -> list[int]:
    """Return the sizes for these contexts in turn, with the state passed on."""
    state: dict[str, Any] = dict(before or {})
    found = []
    for context in contexts:
        context.policy_state = state
        size, state = policy(context)
        found.append(size)
    return found


def test_more_engines_when_the_load_is_high() -> None:
    policy = FleetSizePolicy()
    assert sizes(policy, Context(2, 2, 100.0, load=0.80)) == [2]
    assert sizes(policy, Context(2, 2, 100.0, load=0.90)) == [3]
    assert sizes(policy, Context(2, 2, 100.0, load=5.00)) == [4], "the upper bound"
    assert sizes(policy, Context(2, 3, 100.0, load=0.90)) == [3], "one is starting"


def test_more_engines_when_too_many_requests_are_rejected() -> None:
    policy = FleetSizePolicy()
    assert sizes(policy, Context(2, 2, 100.0, load=0.5, requests=100, rejected=1), before=GROWN) == [2]
    assert sizes(policy, Context(2, 2, 100.0, load=0.5, requests=100, rejected=2), before=GROWN) == [3]
    assert sizes(policy, Context(2, 3, 100.0, load=0.5, requests=100, rejected=9), before=GROWN) == [3], (
        "an engine is starting"
    )
    assert sizes(policy, Context(2, 2, 100.0, load=0.5, requests=10, rejected=5), before=GROWN) == [2], "too few"
    just_grown = {"running": 1, "grown_s": 0.0}
    assert sizes(policy, Context(2, 2, 100.0, load=0.5, requests=100, rejected=9), before=just_grown) == [2]


def test_fewer_engines_after_a_while_and_one_at_a_time() -> None:
    calm = [Context(3, 3, float(at_s), load=0.2) for at_s in (0, 300, 599, 600)]
    then = [Context(2, 2, float(at_s), load=0.2) for at_s in (601, 1100, 1201)]
    assert sizes(FleetSizePolicy(600.0), *calm, *then) == [3, 3, 3, 2, 2, 2, 1]


def test_an_engine_stays_until_no_request_waits() -> None:
    contexts = [
        Context(2, 2, float(at_s), load=0.2, waiting=waiting)
        for at_s, waiting in ((0, 0), (600, 1), (602, 3), (604, 0))
    ]
    assert sizes(FleetSizePolicy(600.0), *contexts) == [2, 2, 2, 1]


def test_engines_without_objectives_report_seats_and_queue() -> None:
    full = Promise(0.0, running=32, waiting=106, best_effort=106, oldest_wait_s=9.0)
    assert load_metrics(full, 0.0) == {LOAD: 4.0, WAITING: 106.0}
    assert load_metrics(None, 0.0) == {LOAD: 0.0, WAITING: 0.0}, "the engine has not begun"
    assert sizes(FleetSizePolicy(), Context(1, 1, 100.0, load=load_metrics(full, 0.0)[LOAD])) == [4], "the upper bound"


def test_a_busy_moment_restarts_the_wait() -> None:
    loads = [(0, 0.2), (500, 0.2), (550, 0.7), (600, 0.2), (1100, 0.2), (1200, 0.2)]
    assert sizes(FleetSizePolicy(600.0), *(Context(2, 2, float(at_s), u) for at_s, u in loads)) == [2, 2, 2, 2, 2, 1]


def test_reports_of_fewer_engines_do_not_count() -> None:
    before = Context(1, 1, 100.0, load=1.4)
    just_grown = Context(2, 2, 130.0, load=1.4, reported_s=125.0)
    later = Context(2, 2, 140.0, load=0.7, reported_s=135.0)
    assert sizes(FleetSizePolicy(), before, just_grown, later) == [2, 2, 2]


def test_nothing_changes_before_engines_report() -> None:
    assert sizes(FleetSizePolicy(), Context(0, 2, 10.0, load=0.0)) == [2]
    assert sizes(FleetSizePolicy(), Context(2, 2, 500.0, load=2.0, reported_s=460.0)) == [2], "old reports"


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_a_clock_that_is_an_hour_off_changes_nothing(off_s: float) -> None:
    full = Context(2, 2, 5000.0, load=0.90, reported_s=5000.0 + off_s)
    assert sizes(FleetSizePolicy(), full) == [3]
