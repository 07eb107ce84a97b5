"""Several engines, as they are asked for: how many, how fast, behind which router, and what happens to them."""

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
    """One engine fewer only if a simulation of the requests of the last `recent_s` keeps `target` of them with one
    fewer.
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
        """Engines that there may be at a time."""
        return self.scaling.max_engines if self.scaling else self.replicas

    @property
    def size(self) -> str:
        """To be shown: how many engines, or between what bounds."""
        return f"{self.scaling.min_engines}-{self.scaling.max_engines}" if self.scaling else str(self.replicas)

    def machine(self, engine: int, machine: Machine) -> Machine:
        """That engine's."""
        if not self.slow or self.slow[engine] == 1.0:
            return machine
        return replace(machine, cost=machine.cost.slower(self.slow[engine]), believed=machine.belief)


@dataclass(slots=True)
class EngineTotals:
    """What an engine did, all of its lives together. `placed`: requests that were sent there, `served_s`: seconds
    between being asked for and its end. Token counts are of prompts.
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
    """`simulation`: of all engines together. `engine_of`: where each request was at last, None = nowhere.

    `reasons`: placements by the router's reason. `retries`: requests that were refused and sent to another engine once;
    `replaced`: placed again before their first token as their engine died or drained, `resumed` after it; each as the
    numbers of the requests. `unplaced`: nobody took requests; `failed`: their engine died for the second time after
    their first token. `sizes`: (at_s, engines) of a fleet that is scaled. `router_s`: real seconds of the router's own.
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
        """Of requests, by what became of them on the way."""
        names = ("retries", "replaced", "resumed", "unplaced", "failed")
        return {name: len(getattr(self, name)) for name in names}
