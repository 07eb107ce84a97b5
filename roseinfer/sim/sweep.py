"""Policies against loads: every policy sees the same arrivals, lengths, objectives and predictions."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.interrupts import sigint_blocked
from roseinfer.core.progress import stage
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import CalibratedLengths, EcdfLengths, OracleLengths
from roseinfer.sched.registry import contenders, entry_of, option_names, scheduler_config, users_of
from roseinfer.sim.autoscaling import simulate_fleet
from roseinfer.sim.fleet_plan import FleetPlan, FleetRun
from roseinfer.sim.report import mean_of, summarise, summarise_fleet, with_all_reasons
from roseinfer.sim.simulator import SimulationResult, simulate
from roseinfer.sim.workload import Arrival

# Suffixes of a contender's name: output lengths that it knows, in place of those that the others know.
KNOWLEDGE = ("oracle", "none")


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """One run."""

    arrivals: Callable[[int], Sequence[Arrival]]
    machine: Machine
    options: Mapping[str, Any]
    lengths: str
    seed: int
    false_rejects: bool = False
    fleet: FleetPlan | None = None
    target: float = 0.99


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Load of a comparison. `rate`: arrivals a second, None for a trace. All policies get equal `arrivals(seed)`."""

    rate: float | None
    arrivals: Callable[[int], Sequence[Arrival]]


@dataclass(frozen=True, slots=True)
class PolicySweep:
    """Comparison of policies. `common`: scheduler options of all contenders, overridden by their settings.

    `given`: options that override both, each for the policies that have it. `fleets`: None = one engine without a
    router. `target`: share of good requests that a fleet must maintain.
    """

    machine: Machine
    loads: Sequence[LoadPoint]
    policies: Sequence[str]
    common: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    lengths: str = "predictor"
    seeds: int = 1
    false_rejects: bool = False
    jobs: int | None = None
    fleets: Sequence[FleetPlan | None] = (None,)
    target: float = 0.99


def contender(name: str) -> tuple[tuple[Mapping[str, Any], ...], str | None]:
    """Return the settings of a contender, and the lengths it knows if its name has a suffix. Raise `ConfigError`."""
    registered = contenders()
    base, _, known = name.rpartition("-")
    if known in KNOWLEDGE and base in registered:
        return registered[base], known
    if name not in registered:
        names = ", ".join(registered)
        raise ConfigError(f"policies: unknown policy {name!r}; use {names}, perhaps with -oracle or -none")
    return registered[name], None


def settings_of(sweep: PolicySweep, name: str) -> list[dict[str, Any]]:
    """Return all scheduler options of each setting of a contender; equal settings count once."""
    found: list[dict[str, Any]] = []
    for setting in contender(name)[0]:
        foreign = option_names() - entry_of(setting["scheduling_policy"]).option_names
        given = {option: value for option, value in sweep.given.items() if option not in foreign}
        options = {**sweep.common, **setting, **given}
        if options not in found:
            found.append(options)
    return found


def check_given(sweep: PolicySweep) -> None:
    """Raise `ConfigError` for a given option that no contender has, or that is invalid."""
    policies = {setting["scheduling_policy"] for name in sweep.policies for setting in contender(name)[0]}
    for option in sorted(sweep.given.keys() & option_names()):
        if not policies & set(users_of(option)):
            raise ConfigError(f"{option} needs scheduling_policy {' or '.join(users_of(option))} among those compared")
    for name in sweep.policies:
        for options in settings_of(sweep, name):
            scheduler_config(**options)


def run_sweep(sweep: PolicySweep) -> list[dict[str, Any]]:
    """Return one point per load, fleet and policy: that of the policy's best setting by adherence.

    If no request has objectives, the setting with most finished requests is the best.
    """
    points = [(load, fleet, name) for load in sweep.loads for fleet in sweep.fleets for name in sweep.policies]
    jobs = [job for load, fleet, name in points for job in _jobs(sweep, load, fleet, name)]
    found = iter(run_jobs(jobs, sweep.jobs))
    return [_best(sweep, load, fleet, name, found) for load, fleet, name in points]


def _jobs(sweep: PolicySweep, load: LoadPoint, fleet: FleetPlan | None, name: str) -> list[SimulationJob]:
    """Return the jobs of a point, by setting and then by seed."""
    lengths = contender(name)[1] or sweep.lengths
    return [
        SimulationJob(load.arrivals, sweep.machine, options, lengths, seed, sweep.false_rejects, fleet, sweep.target)
        for options in settings_of(sweep, name)
        for seed in range(sweep.seeds)
    ]


def _best(
    sweep: PolicySweep, load: LoadPoint, fleet: FleetPlan | None, name: str, summaries: Iterator[dict[str, Any]]
) -> dict[str, Any]:
    """Return a point from the next `summaries`, which are those of its jobs."""
    settings = settings_of(sweep, name)
    runs = [list(islice(summaries, sweep.seeds)) for _ in settings]
    for group in runs:
        with_all_reasons(group)
    found = [(mean_of(group), number) for number, group in enumerate(runs)]
    point, number = max(found, key=lambda item: _merit(item[0]))
    seeds = [run["adherence"] for run in runs[number]]
    which = {"policy": name, "rate": load.rate}
    if fleet is not None:
        which |= {"router": fleet.router, "replicas": fleet.size}
    return {**which, **point, "setting": _own(name, settings[number]), "seeds": seeds}


def _merit(point: Mapping[str, Any]) -> float:
    kept = point["best_effort"]["finished"] if point["adherence"] is None else point["adherence"]
    return float(kept)


def _own(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the contender's settings name."""
    named = {option for setting in contender(name)[0] for option in setting}
    return {option: value for option, value in options.items() if option in named}


def run_jobs(jobs: Sequence[SimulationJob], workers: int | None = None) -> list[dict[str, Any]]:
    """Return summaries in the order of the jobs, run by as many processes as there are cores."""
    workers = min(len(jobs), workers or os.cpu_count() or 1)
    if workers <= 1:
        return _counted(map(run_job, jobs), len(jobs))
    with worker_pool(workers) as pool:
        return _counted(pool.map(run_job, jobs), len(jobs))


def _counted(found: Iterable[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    """Collect all summaries and report progress."""
    with stage("simulating runs") as step:
        summaries = []
        for summary in found:
            summaries.append(summary)
            step(len(summaries), total)
    return summaries


def run_job(job: SimulationJob) -> dict[str, Any]:
    arrivals = job.arrivals(job.seed)
    if job.fleet is not None:
        run = _simulate_fleet(job, job.fleet, arrivals, job.lengths)
        ideal = _simulate_fleet(job, job.fleet, arrivals, "oracle").simulation if job.false_rejects else None
        return summarise_fleet(run, job.target, ideal)
    alone = _simulate(job, arrivals, job.lengths)
    return summarise(alone, _simulate(job, arrivals, "oracle") if job.false_rejects else None)


def _simulate(job: SimulationJob, arrivals: Sequence[Arrival], lengths: str) -> SimulationResult:
    return simulate_as(arrivals, job.machine, job.options, lengths, job.seed)


def _simulate_fleet(job: SimulationJob, plan: FleetPlan, arrivals: Sequence[Arrival], lengths: str) -> FleetRun:
    known_arrivals = [_with_lengths(arrival, lengths) for arrival in arrivals]
    knowledge = EstimatesFactory(job.machine, lengths)
    return simulate_fleet(known_arrivals, scheduler_config(**job.options), job.machine, plan, knowledge, job.seed)


def simulate_as(
    arrivals: Sequence[Arrival], machine: Machine, options: Mapping[str, Any], lengths: str, seed: int
) -> SimulationResult:
    """Simulate a policy with these options, which knows `lengths`: "predictor", "oracle" or "none"."""
    known_arrivals = [_with_lengths(arrival, lengths) for arrival in arrivals]
    estimates = EstimatesFactory(machine, lengths)(seed)
    return simulate(known_arrivals, scheduler_config(**options), machine, estimates=estimates, seed=seed)


@dataclass(frozen=True, slots=True)
class EstimatesFactory:
    """Factory of a policy's initial estimates: the machine's believed costs, and the known `lengths`."""

    machine: Machine
    lengths: str

    def __call__(self, seed: int) -> Estimates:
        known = OracleLengths() if self.lengths == "oracle" else CalibratedLengths(EcdfLengths(seed))
        return Estimates(cost=CostModel(self.machine.belief), lengths=known)


def _with_lengths(arrival: Arrival, lengths: str) -> Arrival:
    """Return the arrival with the prediction that a policy may know."""
    if lengths == "predictor":
        return arrival
    return replace(arrival, predicted_len=arrival.output_len if lengths == "oracle" else None)


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """Highest `rate` of requests a second that meets the target. `tight`: class that misses most just above it.

    If no rate meets the target, `adherence` is None and `rate` 0.
    """

    policy: str
    rate: float
    adherence: float | None
    tight: str
    reasons: Mapping[str, float]


def find_capacity(
    sweep: PolicySweep, name: str, at_rate: Callable[[float], LoadPoint], target: float, *, steps: int = 7
) -> CapacityResult:
    """Find the highest rate that meets the target, by bisection to within 1%.

    Raise `ConfigError` if every rate meets it, or no request has objectives.
    """

    def point(rate: float) -> dict[str, Any]:
        found = run_sweep(replace(sweep, loads=[at_rate(rate)], policies=[name]))[0]
        if found["adherence"] is None:
            raise ConfigError("capacity: no request has objectives")
        return found

    low, high, best, worst = 0.0, 1.0, None, None
    for _ in range(12):
        found = point(high)
        if found["adherence"] < target:
            worst = found
            break
        low, high, best = high, 2 * high, found
    if worst is None:
        raise ConfigError(f"{name} meets the target at every rate up to {low:g} req/s")
    for _ in range(steps):
        middle = (low + high) / 2
        found = point(middle)
        if found["adherence"] >= target:
            low, best = middle, found
        else:
            high, worst = middle, found
    kept = {name: entry["adherence"] for name, entry in worst["classes"].items()}
    misses = {name: 1 - share for name, share in kept.items() if share is not None}
    return CapacityResult(name, low, best["adherence"] if best else None, max(misses, key=misses.__getitem__), misses)


def describe(classes: Sequence[Slo], name: str) -> str:
    """Return a class as text, such as `class 4 (TTFT 500 ms, TPOT 50 ms)`."""
    for slo in classes:
        if slo.class_name == name:
            parts = [("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("latency", slo.e2e_s)]
            limits = ", ".join(f"{what} {1e3 * value:g} ms" for what, value in parts if value is not None)
            return f"class {name} ({limits})"
    return f"class {name}" if name else "requests without objectives"


# --- worker processes ------------------------------------------------------------------------------------------------
@contextmanager
def worker_pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """Start a pool of `count` processes, which end with the block.

    Ctrl+C reaches all processes of a terminal. It ends the pool at once, without further output.
    """
    pool = _Pool(count, initializer=_ignore_interrupts)
    try:
        yield pool
    except BaseException:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


class _Pool(ProcessPoolExecutor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Submit a call with SIGINT blocked, so that a process forked for it starts with SIGINT blocked."""
        with sigint_blocked():
            return super().submit(fn, *args, **more)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
