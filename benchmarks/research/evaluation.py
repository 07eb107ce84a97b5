"""Evaluation of policies on random loads: one policy against the best of the others, load by load, worst first."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.research.bound import fluid_bound
from benchmarks.research.cache import Cache, digest_of, policy_digest
from benchmarks.research.choices import space
from benchmarks.research.random_loads import COMMON, RandomLoad, TraceNeededError, capacity_of, draw_load
from roseinfer.core.progress import report
from roseinfer.priced.machine import Machine
from roseinfer.sim import simulator
from roseinfer.sim.simulator import Lifetime, SimulationResult
from roseinfer.sim.sweep import PolicySweep, check_given, contender, settings_of, simulate_as, worker_pool
from roseinfer.sim.workload import Arrival

POLICIES = ("slack", "qoserve", "fifo", "sarathi", "scorpio", "scorpio-tuned")
GIVEN = {"sarathi_token_budget": 512}
EVEN = 0.99  # share of the best other's that counts as no loss
ENOUGH = 500  # served requests of a class for a meaningful late share
COUNTS = ("requests", "served", "late", "good")
Outcome = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """Loads 0 to `count` - 1 of a seed, and the policies; the first one is judged against the others.

    `given`: scheduler options, each for the policies that have it. `cache`: a directory of results. `jobs`: processes.
    """

    seed: int
    count: int
    traces: str | None = None
    policies: Sequence[str] = POLICIES
    given: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    jobs: int = 1


def check_grid(grid: Grid) -> None:
    """Raise `ConfigError` for an unknown policy, and for options that none of the policies has."""
    for name in grid.policies:
        contender(name)
    entry = next(iter(space()["machines"].values()))
    common = {name: entry[name] for name in COMMON}
    check_given(PolicySweep(Machine(), [], grid.policies, common, dict(grid.given)))


def run_grid(grid: Grid) -> dict[str, Any]:
    """Return `loads` (worst first), `left_out` (loads that lack a trace), `summary`, and `late`, pooled by kind."""
    judged, left_out = [], []
    try:
        for done, (number, found) in enumerate(_run_all(grid), start=1):
            if found is None:
                left_out.append(number)
            else:
                judged.append(found)
            # Only after the pool has forked its processes: the progress listener may have a thread.
            report("simulating loads", done, grid.count)
    finally:
        report("")
    judged.sort(key=lambda entry: (entry["ratio"], entry["number"]))
    return {
        "space": space()["version"],
        "seed": grid.seed,
        "policies": list(grid.policies),
        "loads": judged,
        "left_out": sorted(left_out),
        "summary": {name: summary_of([entry[name] for entry in judged]) for name in ("ratio", "goodput_ratio")},
        "late": pooled_late(judged),
    }


def _run_all(grid: Grid) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield results as they complete."""
    if grid.jobs == 1:
        yield from ((number, evaluate_load(grid, number)) for number in range(grid.count))
        return
    with worker_pool(grid.jobs) as pool:
        running = {pool.submit(evaluate_load, grid, number): number for number in range(grid.count)}
        for future in as_completed(running):
            yield running[future], future.result()


def evaluate_load(grid: Grid, number: int) -> dict[str, Any] | None:
    """Evaluate the policies on a load; None if a trace is missing."""

    def measure(sample: Sequence[Arrival], machine: Machine) -> float:
        key = ["capacity", requests_digest(sample, machine)]
        return _kept_number(grid, key, lambda: capacity_of(sample, machine))

    try:
        load = draw_load(grid.seed, number, traces=grid.traces, measure=measure)
    except TraceNeededError:
        return None
    outcomes = {name: run_policy(grid, load, name) for name in grid.policies}
    return compare(load, outcomes, bound_of(grid, load))


def run_policy(grid: Grid, load: RandomLoad, name: str) -> list[dict[str, Any]]:
    """Return the outcome of each of the policy's settings."""
    sweep = PolicySweep(load.machine, [], [name], load.scheduler, {**GIVEN, **grid.given})
    known = contender(name)[1] or "predictor"
    judged = {setting["scheduling_policy"] for setting in contender(grid.policies[0])[0]}
    return [
        _run(grid, load, options, known, options["scheduling_policy"] in judged) for options in settings_of(sweep, name)
    ]


def _run(grid: Grid, load: RandomLoad, options: Mapping[str, Any], known: str, judged: bool) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        try:
            with without_collections():
                return outcome_of(simulate_as(load.arrivals, load.machine, options, known, load.number))
        except Exception as error:
            error.add_note(f"{load.name}, {options}")
            raise

    if grid.cache is None:
        return {"options": dict(options), **run()}
    policy = options["scheduling_policy"]
    key = [load_digest(load), sorted(options.items()), known, policy_digest(policy, with_shared=judged)]
    return {"options": dict(options), **Cache(grid.cache).get(key, run)}


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect garbage after a run: during it, the search costs a tenth of the time and finds little."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        gc.collect()


def bound_of(grid: Grid, load: RandomLoad) -> float:
    """Return the share of requests with objectives that could be good with everything known in advance."""
    key = ["bound", requests_digest(load.arrivals, load.machine)]
    return _kept_number(grid, key, lambda: fluid_bound(load.arrivals, load.machine))


def _kept_number(grid: Grid, key: list[Any], make: Callable[[], float]) -> float:
    """Return a cached number as long as the simulation has not changed."""
    if grid.cache is None:
        return make()
    sources = [file for module in (__file__, simulator.__file__) for file in sorted(Path(module).parent.glob("*.py"))]
    return float(Cache(grid.cache).get([*key, digest_of(sources)], lambda: {"value": make()})["value"])


def load_digest(load: RandomLoad) -> str:
    """Return a digest of everything that a run depends on, but not of how the load was drawn."""
    common = repr((sorted(load.scheduler.items()), load.number))
    return digest_of(text=[common, requests_digest(load.arrivals, load.machine)])


def requests_digest(arrivals: Sequence[Arrival], machine: Machine) -> str:
    parts = [repr(machine)]
    for a in arrivals:
        told = (a.predicted_len, a.hinted, a.tenant, a.priority)
        parts.append(repr((a.at_s, len(a.prompt_ids), a.output_len, a.slo, told)))
    return digest_of(text=parts)


def outcome_of(run: SimulationResult) -> dict[str, Any]:
    """Count requests with objectives in total, by class and by tenant; best effort is only counted.

    `served`: finished; `late`: of these, with an objective missed; `good`: with all met.
    """
    promised = [life for life in run.lifetimes if life.promised]
    whole = _counts(promised)
    return {
        **whole,
        "adherence": whole["good"] / whole["requests"] if promised else 1.0,
        "goodput_req_s": whole["good"] / run.elapsed_s,
        "classes": _grouped(promised, lambda life: life.slo.class_name if life.slo else ""),
        "tenants": _grouped(promised, lambda life: life.tenant),
        "best_effort": len(run.lifetimes) - len(promised),
        "elapsed_s": run.elapsed_s,
        "steps": run.steps,
        "preemptions": run.preemptions,
    }


def _grouped(lives: Sequence[Lifetime], key: Callable[[Lifetime], str]) -> dict[str, dict[str, int]]:
    groups: dict[str, list[Lifetime]] = {}
    for life in lives:
        groups.setdefault(key(life), []).append(life)
    return {name: _counts(group) for name, group in sorted(groups.items())}


def _counts(lives: Sequence[Lifetime]) -> dict[str, int]:
    served, good = sum(life.served for life in lives), sum(life.good for life in lives)
    return dict(zip(COUNTS, (len(lives), served, served - good, good), strict=True))


def compare(load: RandomLoad, outcomes: Mapping[str, Sequence[Outcome]], share: float) -> dict[str, Any]:
    """Compare the first policy's best setting with the best of all others', by adherence and by goodput."""
    first, *others = outcomes
    own = max(outcomes[first], key=lambda outcome: outcome["adherence"])
    best = best_of(outcomes, others, "adherence")
    most = best_of(outcomes, others, "goodput_req_s")
    return {
        "number": load.number,
        "kinds": list(load.kinds),
        "description": load.description,
        "load": load.choices.load,
        "rate": load.rate,
        "capacity": load.capacity,
        "requests": len(load.arrivals),
        "promised": own["requests"],
        "objectives": [chosen["objectives"] for chosen in load.choices.of_classes],
        "hints": load.choices.of_load["hints"]["kind"],
        "adherence": own["adherence"],
        "best_other": best[1],
        "who": best[0],
        "ratio": ratio(own["adherence"], best[1]),
        "goodput_ratio": ratio(own["goodput_req_s"], most[1]),
        "goodput_who": most[0],
        "late": own["late"] / own["served"] if own["served"] else 0.0,
        "bound": share,
        "of_bound": ratio(own["adherence"], share),
        "classes": own["classes"],
        "outcomes": {name: list(found) for name, found in outcomes.items()},
    }


def best_of(outcomes: Mapping[str, Sequence[Outcome]], names: Iterable[str], measure: str) -> tuple[str, float]:
    """Return the policy with the best setting, and its value; 0 if there is none."""
    found = [(max(outcome[measure] for outcome in outcomes[name]), name) for name in names]
    most, who = max(found, default=(0.0, ""), key=lambda item: item[0])
    return who, most


def ratio(own: float, other: float) -> float:
    """Return the ratio; 1 if both are zero."""
    if other > 0:
        return own / other
    return inf if own > 0 else 1.0


def summary_of(ratios: Sequence[float]) -> dict[str, float | None]:
    """Return the share of loads with a loss of at most a hundredth, the worst, and the median."""
    if not ratios:
        return {"even": None, "worst": None, "median": None}
    even = sum(value >= EVEN for value in ratios) / len(ratios)
    return {"even": even, "worst": min(ratios), "median": median(ratios)}


def pooled_late(judged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Pool the late share of the judged policy by kind of load: by class number, by objectives, and in total.

    `enough`: enough requests were served for the share to be meaningful. A load of several kinds counts in each. Class
    1 of one load is unrelated to class 1 of another: numbers split the pool at random, objectives into similar parts.
    """
    pools: dict[tuple[str, str], list[int]] = {}
    for entry in judged:
        for name, counts in entry["classes"].items():
            promised = entry["objectives"][int(name) - 1]
            for kind in entry["kinds"]:
                for group in ("all", f"class {name}", promised):
                    pool = pools.setdefault((kind, group), [0, 0])
                    pool[0] += counts["served"]
                    pool[1] += counts["late"]
    return [
        {"kind": kind, "of": group, "served": served, "late": late, "share": late / served, "enough": served >= ENOUGH}
        for (kind, group), (served, late) in sorted(pools.items())
        if served
    ]
