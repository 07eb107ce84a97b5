"""Runs of several engines, with and without autoscaling."""

from collections.abc import Callable, Sequence

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.priced.machine import Machine
from roseinfer.sched.estimates import Estimates
from roseinfer.sim.fleet import Fleet
from roseinfer.sim.fleet_plan import FleetPlan, FleetRun
from roseinfer.sim.scaled import ScaledFleet
from roseinfer.sim.workload import Arrival


def simulate_fleet(
    arrivals: Sequence[Arrival],
    scheduler: SchedulerConfig,
    machine: Machine,
    plan: FleetPlan,
    estimates: Callable[[int], Estimates],
    seed: int = 0,
) -> FleetRun:
    """`arrivals` are sorted by time. `estimates(seed)`: what an engine's policy knows when it starts.

    Raises as `simulate` for one engine.
    """
    kind = ScaledFleet if plan.scaling is not None else Fleet
    return kind(arrivals, scheduler, machine, plan, estimates, seed).run()
