"""Plan of a simulated fleet: engines, their speeds, the router, and events; and the record of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roseinfer.priced.machine import Machine
from roseinfer.router.fleet_size import FleetSizeRule
from roseinfer.sim.simulator import SimulationResult


@dataclass(frozen=True, slots=True)
class Kill:
    """Engine `engine` dies at `at_s`, in simulated seconds."""

    engine: int
    at_s: float


@dataclass(frozen=True, slots=True)
class AutoscalePlan(FleetSizeRule):
    """Rule of an autoscaler that removes an engine only if a simulation without it meets `target`.

    The simulation has the requests of the last `recent_s` seconds.
    """

    target: float = 0.95
    recent_s: float = 180.0


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """`replicas` engines behind the router of that name; all numbers of engines count from 0.

    `slow`: how many times as long as the machine's the steps of each engine take, which its policy is not told; empty:
    all alike. `start_s`: how long an engine takes until it serves, after it died or was asked for.
    """

    replicas: int
    router: str
    slow: tuple[float, ...] = ()
    kills: tuple[Kill, ...] = ()
    start_s: float = 40.0
    scaling: AutoscalePlan | None = None

    @property
    def most(self) -> int:
        """Largest number of engines at a time."""
        return self.scaling.max_engines if self.scaling else self.replicas

    @property
    def size(self) -> str:
        """Number of engines, or its bounds, as text."""
        return f"{self.scaling.min_engines}-{self.scaling.max_engines}" if self.scaling else str(self.replicas)

    def machine(self, engine: int, machine: Machine) -> Machine:
        """Return the machine of one engine."""
        if not self.slow or self.slow[engine] == 1.0:
            return machine
        return replace(machine, cost=machine.cost.slower(self.slow[engine]), believed=machine.belief)


@dataclass(slots=True)
class EngineTotals:
    """Totals of one engine over all its lives. `placed`: requests sent to it. `served_s`: seconds from request to end.

    Token counts are of prompts.
    """

    placed: int = 0
    deaths: int = 0
    steps: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    served_s: float = 0.0
    policy_s: float = 0.0
    kv_peak: float = 0.0
    prefix_tokens: int = 0
    prefix_hits: int = 0


@dataclass(slots=True)
class FleetRun:
    """Run of a fleet. `simulation`: all engines together. `engine_of`: last engine of each request, None = none.

    `reasons`: placements by the router's reason. The following are numbers of requests. `retries`: rejected and sent to
    another engine once. `replaced`: placed again before their first token, as their engine died, drained or was full.
    `resumed`: continued on another engine after it, as theirs died. `unplaced`: no engine was available. `failed`:
    their engine died again after their first token. `sizes`: (at_s, engines) of a scaled fleet. `router_s`: real
    seconds spent in the router.
    """

    simulation: SimulationResult
    engines: list[EngineTotals]
    engine_of: list[int | None]
    reasons: Mapping[str, int] = field(default_factory=dict)
    retries: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    unplaced: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    router_s: float = field(default=0.0, compare=False)

    def counts(self) -> dict[str, Any]:
        """Return counts of requests that were retried, replaced, resumed, failed or not placed."""
        names = ("retries", "replaced", "resumed", "unplaced", "failed")
        return {name: len(getattr(self, name)) for name in names}
