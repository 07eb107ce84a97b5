"""What a run of several engines comes to, beside what one engine's does (`roseinfer.sim.report`)."""

from collections.abc import Sequence
from typing import Any

from roseinfer.sim.fleet_plan import FleetRun
from roseinfer.sim.report import adherence, summarise
from roseinfer.sim.simulator import Lifetime, SimulationResult

WINDOW_S = 10.0


def summarise_fleet(run: FleetRun, target: float, replay: SimulationResult | None = None) -> dict[str, Any]:
    """As `summarise`, and under `fleet` what is of engines and router.

    `good_retries`: of those refused once, how many kept their objectives elsewhere. `replica_s`: seconds that engines
    were paid for, start-up included. `below_target_s`: how long arrivals kept less than `target` of their objectives
    at a stretch, in windows of 10 s: after a step in load, the time until it is met again.
    """
    lives = run.simulation.lifetimes
    totals = run.engines
    tokens = sum(each.prefix_tokens for each in totals)
    fleet = {
        "engines": {str(number): _engine(run, number) for number in range(len(totals))},
        **run.counts(),
        "good_retries": sum(lives[number].good for number in run.retries),
        "good_resumed": sum(lives[number].good for number in run.resumed),
        "deaths": sum(each.deaths for each in totals),
        "prefix_hit_share": sum(each.prefix_hits for each in totals) / tokens if tokens else 0.0,
        "reasons": dict(run.reasons),
        "replica_s": sum(each.served_s for each in totals),
        "most_engines": max([size for _, size in run.sizes], default=len(totals)),
        "below_target_s": longest_below(lives, target),
        "router_us": 1e6 * run.router_s / max(1, sum(run.reasons.values())),
    }
    return {**summarise(run.simulation, replay), "fleet": fleet}


def _engine(run: FleetRun, number: int) -> dict[str, Any]:
    """`adherence`: of the requests that were there at last."""
    each = run.engines[number]
    there = [life for life, engine in zip(run.simulation.lifetimes, run.engine_of, strict=True) if engine == number]
    return {
        "placed": each.placed,
        "share": each.placed / max(1, sum(other.placed for other in run.engines)),
        "adherence": adherence(there),
        "busy_share": each.busy_s / each.served_s if each.served_s else 0.0,
        "prefix_hit_share": each.prefix_hits / each.prefix_tokens if each.prefix_tokens else 0.0,
        "kv_peak": each.kv_peak,
        "steps": each.steps,
        "preemptions": each.preemptions,
        "deaths": each.deaths,
    }


def longest_below(lives: Sequence[Lifetime], target: float) -> float:
    """Seconds of arrivals, at a stretch, of which less than `target` was good; windows without promises are skipped."""
    if not lives:
        return 0.0
    windows: dict[int, list[Lifetime]] = {}
    for life in lives:
        windows.setdefault(int((life.arrival_s - lives[0].arrival_s) // WINDOW_S), []).append(life)
    longest = present = 0
    for number in range(max(windows) + 1):
        kept = adherence(windows.get(number, []))
        if kept is not None:
            present = present + 1 if kept < target else 0
            longest = max(longest, present)
    return longest * WINDOW_S


def with_all_reasons(points: Sequence[dict[str, Any]]) -> None:
    """Reasons that only some runs have are 0 in the others, so that means can be taken."""
    tables: list[dict[str, int]] = [point["fleet"]["reasons"] for point in points if "fleet" in point]
    for table in tables:
        for reason in {reason for other in tables for reason in other}:
            table.setdefault(reason, 0)
