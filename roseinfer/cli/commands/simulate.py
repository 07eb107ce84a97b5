"""roseinfer simulate: evaluate scheduling policies on a workload in simulated time, without a model."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from roseinfer.cli.commands import fleet_tables
from roseinfer.cli.commands.groups import POLICY, SCHEDULER, scheduler_options
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.progress import stage
from roseinfer.sched.registry import contenders, scheduler_config
from roseinfer.sim.adapters import SimulatedAdapterConfig
from roseinfer.sim.config import CONSTANTS, CostConfig, SweepConfig, WorkloadConfig
from roseinfer.sim.fleet_config import FleetConfig

NAME = "simulate"
# In a simulation, `cost` and `lengths` describe step costs and output lengths to policies.
POLICY_KNOWLEDGE_OPTIONS = frozenset({"cost_model", "length_estimator"})
POLICY_NAMES_HELP = "append -oracle or -none to a policy for true or no output lengths"
HELP = "simulate scheduling policies on a workload with a cost model instead of a model"
OPTIONS = OptionSet(
    Group(WorkloadConfig, "workload"),
    Group(SweepConfig, "comparison", help={"policies": f"compare {', '.join(contenders())}; {POLICY_NAMES_HELP}"}),
    Group(FleetConfig, "several engines"),
    Group(CostConfig, "cost model and cache (without a setup)"),
    Group(SimulatedAdapterConfig, "LoRA adapters"),
    SCHEDULER,
    Group(POLICY.kind, POLICY.title, skip=POLICY_KNOWLEDGE_OPTIONS),
    removed={
        **dict.fromkeys(
            ("random_loads", "traces", "cache"), "use `python -m benchmarks.research.grid`, with the same options"
        ),
        "roles": "the experiment with separate prefill engines has ended (docs/research/prefill-and-decode-apart.md)",
        "move_us": "it belonged to --roles (docs/research/prefill-and-decode-apart.md)",
    },
)
# Each of these starts a comparison, even of one policy.
COMPARISON_OPTIONS = frozenset(each.name for each in fields(SweepConfig))
# Options that name the policy of a single run.
SINGLE_RUN_OPTIONS = ("scheduling_policy", "prefill_admission_policy")
# Column of the table -> member of a point.
COLUMNS = {
    "goodput": ("goodput_req_s",),
    "in window": ("goodput_window_req_s",),
    "adherence": ("adherence",),
    "rejected": ("rejected",),
    "missed": ("accepted_missed",),
    "TTFT p95 ms": ("ttft_ms", "p95"),
    "TPOT p95 ms": ("tpot_ms", "p95"),
    "good tok/s": ("good_tok_s",),
    "best effort": ("best_effort", "finished"),
    "wait p50 ms": ("best_effort", "ttft_ms", "p50"),
    "p99": ("best_effort", "ttft_ms", "p99"),
    "policy us": ("scheduler_us_per_step",),
}
SHARES = ("adherence", "rejected", "missed", "best effort")
REJECTED_BY_COLUMN = "rejected by"  # shown if a request was rejected
WAITED_FOR_COLUMN = "waited for"
BEST_EFFORT = ("best effort", "wait p50 ms", "p99")  # shown if there is a value


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    workload, sweep = OPTIONS.build(WorkloadConfig, given), OPTIONS.build(SweepConfig, given)
    cost, lora = OPTIONS.build(CostConfig, given), OPTIONS.build(SimulatedAdapterConfig, given)
    fleet = OPTIONS.build(FleetConfig, given)
    fleet.check_needed(given)
    if cost.cost is not None and given.keys() & set(CONSTANTS):
        raise ConfigError(f"cost: the file already contains {min(given.keys() & set(CONSTANTS))}")
    if workload.replay is not None:
        if fleet.active:
            raise ConfigError("--replicas cannot be combined with --replay: the recording sets the number of engines")
        result = run_replay(workload.replay)
    elif not (fleet.active or workload.setup or workload.file or given.keys() & COMPARISON_OPTIONS):
        result = run_one(workload, cost, lora, scheduler_config(**scheduler_options(given)))
    else:
        result = run_comparison(workload, sweep, cost, lora, fleet, given)
    if workload.json:
        Path(workload.json).write_text(json.dumps({**result, "args": given}, indent=2, default=str) + "\n")
    return 0


def run_replay(path: str) -> dict[str, Any]:
    """Replay a recorded run on its own times and compare plans and, for several engines, placements."""
    from roseinfer.sim.parity import is_fleet, parity_of

    if is_fleet(path):
        return fleet_tables.run_fleet_replay(path)
    with stage("replaying"):
        parity = parity_of(path)
    print(parity)
    return {"parity": {**asdict(parity), "plans_agree": parity.plans_agree, "medians_agree": parity.medians_agree}}


def run_one(
    workload: WorkloadConfig, cost: CostConfig, lora: SimulatedAdapterConfig, scheduler: SchedulerConfig
) -> dict[str, Any]:
    from roseinfer.cli.commands.scenario import slo_classes
    from roseinfer.sim.arrivals import make_arrivals
    from roseinfer.sim.simulator import simulate

    with stage("simulating"):
        machine = replace(cost.machine, acceptance=workload.acceptance, adapters=lora.machine)
        arrivals = lora.name(make_arrivals(workload, classes=slo_classes(workload)), workload.seed)
        result = describe(simulate(arrivals, scheduler, machine))
    width = max(map(len, result))
    for name, value in result.items():
        shown = f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)
        print(f"{name.ljust(width)}  {shown}")
    return result


def describe(simulation: Any) -> dict[str, float | int | None]:
    """Return figures in milliseconds where the name says so; rates are per simulated second.

    Percentiles of no values are None.
    """
    from roseinfer.sim.report import percentiles

    lives = [life for life in simulation.lifetimes if life.token_s]
    tokens = sum(len(life.token_s) for life in lives)
    summary: dict[str, float | int | None] = {
        "requests": len(simulation.lifetimes),
        "steps": simulation.steps,
        "preemptions": simulation.preemptions,
        "simulated s": simulation.elapsed_s,
        "busy share": simulation.per_s(simulation.busy_s),
        "output tok/s": simulation.per_s(tokens),
        "from KV cache": simulation.reused[0],
        "from host memory": simulation.reused[1],
    }
    measures = {
        "TTFT": [life.ttft_s for life in lives],
        "TPOT": [life.tpot_s for life in lives if life.tpot_s is not None],
        "latency": [life.latency_s for life in lives],
    }
    for name, values in measures.items():
        summary |= {f"{name} ms {which}": value for which, value in percentiles(values).items()}
    return summary


def run_comparison(
    workload: WorkloadConfig,
    options: SweepConfig,
    cost: CostConfig,
    lora: SimulatedAdapterConfig,
    fleet: FleetConfig,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Compare policies. Scheduler and policy options in `given` apply to the policies that have them."""
    from roseinfer.bench.plot import check_plot
    from roseinfer.cli.commands.scenario import scenario_of
    from roseinfer.sim.plot import plot_sweep
    from roseinfer.sim.sweep import check_given, contender, run_sweep

    scheduler = scheduler_options(given)
    names = _policies(options, scheduler)
    for name in names:
        contender(name)
    if options.plot:
        check_plot(options.plot)
    scenario = scenario_of(workload, cost, lora, given)
    sweep = _sweep(scenario, names, options, fleet, scheduler)
    check_given(sweep)
    if options.capacity:
        if all(slo.empty for slo in scenario.classes):
            raise ConfigError("--capacity requires objectives: give --setup or --slo-classes")
        return _capacities(sweep, scenario.at_rate, options.target, scenario.classes)
    points = run_sweep(sweep)
    print_points(points)
    if fleet.active:
        fleet_tables.print_fleets(points)
    if workload.file is not None:
        print_classes(points)
    if options.plot:
        plot_sweep(options.plot, points)
    return {"points": points}


def _policies(options: SweepConfig, scheduler: Mapping[str, Any]) -> list[str]:
    """Return the names of the policies to compare, by default the one that a single run would have."""
    named: dict[str, Any] = {name: scheduler.get(name) for name in SINGLE_RUN_OPTIONS}
    return options.policy_list or [SchedulerConfig(**named).policy_name]


def _sweep(
    scenario: Any, policies: Sequence[str], options: SweepConfig, fleet: FleetConfig, scheduler: Mapping[str, Any]
) -> Any:
    from roseinfer.sim.sweep import PolicySweep

    machine = scenario.machine
    if options.slowdown != 1.0:
        machine = machine.misjudged(options.slowdown)
    chosen = {name: value for name, value in scheduler.items() if name not in SINGLE_RUN_OPTIONS}
    return PolicySweep(
        machine=machine,
        loads=_loads(scenario, options),
        policies=policies,
        common=scenario.common,
        given=chosen,
        lengths=options.lengths,
        seeds=options.seeds,
        false_rejects=options.false_rejects,
        jobs=options.jobs,
        fleets=fleet.plans(options.target) if fleet.active else (None,),
        target=options.target,
    )


def _loads(scenario: Any, options: SweepConfig) -> list[Any]:
    traced = None in scenario.rates
    if options.capacity:
        if traced:
            raise ConfigError("capacity requires a variable rate, not a trace")
        return []
    rates = scenario.rates if traced else options.rate_list or scenario.rates
    if not rates:
        raise ConfigError("rates is required: requests per second, such as 5,10,20 (in a workload file: rate)")
    return [scenario.at_rate(rate) for rate in rates]


def _capacities(sweep: Any, at_rate: Any, target: float, classes: Sequence[Any]) -> dict[str, Any]:
    from roseinfer.sim.sweep import describe as describe_class
    from roseinfer.sim.sweep import find_capacity

    found = []
    for plan, name in product(sweep.fleets, sweep.policies):
        capacity = find_capacity(replace(sweep, loads=[], fleets=[plan]), name, at_rate, target)
        tight = describe_class(classes, capacity.tight)
        who = name if plan is None else f"{name}, {plan.router}, {plan.size} engine{'' if plan.size == 1 else 's'}"
        kept = f"{capacity.rate:.2f} req/s at {target:.1%}; just above"
        if capacity.adherence is None:
            kept = f"does not meet {target:.1%} at any rate; with one request at a time"
        print(f"{who}: {kept}, {tight} is the limit")
        where = {} if plan is None else {"router": plan.router, "replicas": plan.size}
        found.append({**asdict(capacity), **where, "target": target, "tight_objective": tight})
    return {"capacity": found}


def print_points(points: Sequence[Mapping[str, Any]]) -> None:
    from roseinfer.bench.report import table

    rows = []
    sizes = fleet_tables.several_sizes(points)
    for point in points:
        row: dict[str, Any] = fleet_tables.which(point, sizes) if "router" in point else {}
        row |= {"policy": point["policy"], "req/s": point["rate"] or point["offered_req_s"]}
        for title, path in COLUMNS.items():
            value: Any = point
            for part in path:
                value = None if value is None else value[part]
            shown = title in SHARES and value is not None
            row[title] = f"{value:.3f}" if shown else value
        row[REJECTED_BY_COLUMN] = shares(point["refused_by"])
        row[WAITED_FOR_COLUMN] = shares(point["waited_s"], most=2)
        rows.append(row)
    if all(point["best_effort"] is None for point in points):
        rows = [{title: row[title] for title in row if title not in BEST_EFFORT} for row in rows]
    if not any(row[REJECTED_BY_COLUMN] for row in rows):
        rows = [{title: row[title] for title in row if title != REJECTED_BY_COLUMN} for row in rows]
    print(table(rows))


def shares(counts: Mapping[str, float], most: int | None = None) -> str:
    """Format the `most` largest shares: `price 91%, queue 9%`."""
    whole = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{cause} {count / whole:.0%}" for cause, count in ordered if count > 0.005 * whole)


def print_classes(points: Sequence[Mapping[str, Any]]) -> None:
    """Print the outcome of each class."""
    from roseinfer.bench.report import table

    rows = []
    for point in points:
        for name, found in point["classes"].items():
            kept = found["adherence"]
            row = fleet_tables.which(point, fleet_tables.several_sizes(points)) if "router" in point else {}
            row |= {"policy": point["policy"], "req/s": point["rate"], "class": name}
            row |= {"adherence": None if kept is None else f"{kept:.3f}", "rejected": f"{found['rejected']:.3f}"}
            for title in ("ttft_ms", "tpot_ms"):
                row[f"{title[:4].upper()} p50 ms"] = found[title]["p50"]
                row[f"{title[:4].upper()} p95 ms"] = found[title]["p95"]
            rows.append(row)
    print(table(rows))
