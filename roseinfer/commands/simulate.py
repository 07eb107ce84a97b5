"""roseinfer simulate: what a scheduling policy would do to a workload, in a moment and without a model."""

from argparse import Namespace
from typing import Any

from roseinfer.core.config import SchedulerConfig
from roseinfer.options import Group, OptionParser, OptionSet
from roseinfer.sim.config import CostConfig, WorkloadConfig

NAME = "simulate"
HELP = "run the scheduler on a workload without a model, with a cost model for time"
OPTIONS = OptionSet(
    Group(WorkloadConfig, "workload"), Group(CostConfig, "cost model and cache"), Group(SchedulerConfig, "scheduler")
)
PERCENTILES = (50, 95, 99)


def configure(parser: OptionParser) -> None:
    """Everything is in OPTIONS."""


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    workload, cost = OPTIONS.build(WorkloadConfig, given), OPTIONS.build(CostConfig, given)
    scheduler = OPTIONS.build(SchedulerConfig, given)

    from roseinfer.sim.simulator import make_arrivals, simulate

    result = summarise(simulate(make_arrivals(workload), scheduler, cost))
    width = max(map(len, result))
    for name, value in result.items():
        print(f"{name.ljust(width)}  {value:.3f}" if isinstance(value, float) else f"{name.ljust(width)}  {value}")
    if workload.json:
        import json
        from pathlib import Path

        Path(workload.json).write_text(json.dumps({**result, "args": given}, indent=2, default=str) + "\n")
    return 0


def summarise(simulation: Any) -> dict[str, float | int]:
    """Milliseconds where the name says so; rates per simulated second."""
    from roseinfer.bench.report import percentile

    lives = simulation.lifetimes
    tokens = sum(len(life.token_s) for life in lives)
    summary: dict[str, float | int] = {
        "requests": len(lives),
        "steps": simulation.steps,
        "preemptions": simulation.preemptions,
        "simulated s": simulation.elapsed_s,
        "busy share": simulation.busy_s / simulation.elapsed_s,
        "output tok/s": tokens / simulation.elapsed_s,
    }
    measures = {
        "TTFT": [life.ttft_s for life in lives],
        "TPOT": [life.tpot_s for life in lives if life.tpot_s is not None],
        "latency": [life.latency_s for life in lives],
    }
    for name, values in measures.items():
        summary |= {f"{name} ms p{p}": percentile(values, p) * 1e3 for p in PERCENTILES}
    return summary
