"""The policy that Ray Serve asks for the number of engines."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from roseinfer.integrations.ray.scaling import PROMISED, REFUSED, USED, FleetSize, Point


@dataclass
class Context:
    """What Serve would give: engines that have all reported the same. `promised`, `refused`: in the last 20 s."""

    current_num_replicas: int
    target_num_replicas: int
    current_time: float
    u: float
    promised: float = 0.0
    refused: float = 0.0
    reported_s: float | None = None
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4
    policy_state: dict[str, Any] = field(default_factory=dict)

    @property
    def raw_metrics(self) -> dict[str, dict[str, list[Point]]]:
        at_s = self.current_time if self.reported_s is None else self.reported_s
        ever = {PROMISED: (7000.0, self.promised), REFUSED: (50.0, self.refused)}
        found = {
            name: [Point(at_s - 20.0, before), Point(at_s, before + more)] for name, (before, more) in ever.items()
        }
        found[USED] = [Point(at_s, self.u)]
        engines = [f"engine{number}" for number in range(self.current_num_replicas)]
        return {name: dict.fromkeys(engines, points) for name, points in found.items()}


GROWN = {"running": 2, "grown_s": 0.0}  # long ago


def sizes(policy: FleetSize, *contexts: Context, before: dict[str, Any] | None = None) -> list[int]:
    """What it says to one after the other, each with the state that it left."""
    state: dict[str, Any] = dict(before or {})
    found = []
    for context in contexts:
        context.policy_state = state
        size, state = policy(context)
        found.append(size)
    return found


def test_more_engines_when_they_are_full() -> None:
    policy = FleetSize()
    assert sizes(policy, Context(2, 2, 100.0, u=0.80)) == [2]
    assert sizes(policy, Context(2, 2, 100.0, u=0.90)) == [3]
    assert sizes(policy, Context(2, 2, 100.0, u=5.00)) == [4], "the most"
    assert sizes(policy, Context(2, 3, 100.0, u=0.90)) == [3], "it is coming"


def test_more_engines_when_requests_are_refused_that_could_be_kept() -> None:
    policy = FleetSize()
    assert sizes(policy, Context(2, 2, 100.0, u=0.5, promised=100, refused=1), before=GROWN) == [2]
    assert sizes(policy, Context(2, 2, 100.0, u=0.5, promised=100, refused=2), before=GROWN) == [3]
    assert sizes(policy, Context(2, 3, 100.0, u=0.5, promised=100, refused=9), before=GROWN) == [3], "one is coming"
    assert sizes(policy, Context(2, 2, 100.0, u=0.5, promised=10, refused=5), before=GROWN) == [2], "too few to say"
    just_grown = {"running": 1, "grown_s": 0.0}
    assert sizes(policy, Context(2, 2, 100.0, u=0.5, promised=100, refused=9), before=just_grown) == [2]


def test_fewer_engines_only_after_a_while_and_one_at_a_time() -> None:
    calm = [Context(3, 3, float(at_s), u=0.2) for at_s in (0, 300, 599, 600)]
    then = [Context(2, 2, float(at_s), u=0.2) for at_s in (601, 1100, 1201)]
    assert sizes(FleetSize(600.0), *calm, *then) == [3, 3, 3, 2, 2, 2, 1]


def test_a_busy_moment_begins_the_wait_anew() -> None:
    loads = [(0, 0.2), (500, 0.2), (550, 0.7), (600, 0.2), (1100, 0.2), (1200, 0.2)]
    assert sizes(FleetSize(600.0), *(Context(2, 2, float(at_s), u) for at_s, u in loads)) == [2, 2, 2, 2, 2, 1]


def test_what_was_reported_of_fewer_engines_does_not_count() -> None:
    before = Context(1, 1, 100.0, u=1.4)
    just_grown = Context(2, 2, 130.0, u=1.4, reported_s=125.0)
    later = Context(2, 2, 140.0, u=0.7, reported_s=135.0)
    assert sizes(FleetSize(), before, just_grown, later) == [2, 2, 2]


def test_nothing_changes_while_nothing_is_known() -> None:
    assert sizes(FleetSize(), Context(0, 2, 10.0, u=0.0)) == [2]
    assert sizes(FleetSize(), Context(2, 2, 500.0, u=2.0, reported_s=460.0)) == [2], "they were not two yet"


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_a_clock_that_is_an_hour_off_changes_nothing(off_s: float) -> None:
    full = Context(2, 2, 5000.0, u=0.90, reported_s=5000.0 + off_s)
    assert sizes(FleetSize(), full) == [3]
