"""Autoscaling of simulated fleets under five loads: `python -m benchmarks.research.fleets` prints a table.

One to three engines of 32 seats: 20 ms a step, .1 ms a prompt token, 20 s to start, and the rule of
`simulate --autoscale` with a patience of a minute. It takes about two minutes.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise

from roseinfer.core.slo import Slo
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.autoscaling import simulate_fleet
from roseinfer.sim.config import CostConfig
from roseinfer.sim.fleet_plan import AutoscalePlan, FleetPlan, FleetRun
from roseinfer.sim.sweep import EstimatesFactory
from roseinfer.sim.workload import Arrival

SEATS_COUNT, MAX_ENGINES, PATIENCE_S, START_S = 32, 3, 60.0, 20.0
MACHINE = CostConfig(
    step_ms=20.0, token_us=100.0, row_us=20.0, context_ns=0.0, num_kv_blocks=16384, enable_prefix_caching=False
).machine
SLO = Slo(2.0, 0.1)
LOADS = ("objectives only", "none", "mixed", "bursts", "long prompts")


def requests(rate: float, begin_s: float, end_s: float, prompt: int = 20, output: int = 100) -> list[Arrival]:
    """Return requests without objectives at equal distances."""
    count = int(rate * (end_s - begin_s))
    return [Arrival(begin_s + n / rate, [1] * prompt, output, predicted_len=output) for n in range(count)]


def arrivals(load: str) -> list[Arrival]:
    """Return the requests of one of `LOADS`: a rush of one or two minutes, or bursts, and then a calm."""
    if load == "bursts":
        bursts = [requests(400.0, at_s, at_s + 1.0) for at_s in (30.0, 90.0, 150.0)]
        return sorted([*requests(2.0, 0.0, 300.0), *chain.from_iterable(bursts)], key=lambda arrival: arrival.at_s)
    if load == "long prompts":
        return requests(5.0, 0.0, 120.0, 4000, 20) + requests(0.5, 120.0, 300.0, 4000, 20)
    rush = requests(40.0, 0.0, 60.0) + requests(4.0, 60.0, 240.0)
    every = {"objectives only": 1, "mixed": 2}.get(load, len(rush) + 1)
    return [replace(one, slo=SLO) if number % every == every - 1 else one for number, one in enumerate(rush)]


def run(load: str, engines: int) -> FleetRun:
    scaling = AutoscalePlan(1, MAX_ENGINES, patience_s=PATIENCE_S)
    plan = FleetPlan(engines, "pace", start_s=START_S, scaling=scaling)
    config = scheduler_config(scheduling_policy="slack", max_num_seqs=SEATS_COUNT)
    machine = replace(MACHINE, max_model_len=8192)
    return simulate_fleet(arrivals(load), config, machine, plan, EstimatesFactory(machine, "predictor"))


def row(load: str, engines: int) -> Iterator[str]:
    """Yield the cells of one run."""
    found = run(load, engines)
    lives = found.simulation.lifetimes
    yield from (load, str(engines))
    changes = [f"{size} at {at_s:.0f}" for (_, before), (at_s, size) in pairwise(found.sizes) if size != before]
    yield ", ".join(changes) or "-"
    removed_s = [at_s for (_, before), (at_s, size) in pairwise(found.sizes) if size < before]
    started = [one for one in lives if one.token_s]  # the others were rejected
    late = [sum(one.arrival_s < at_s - 0.5 and one.token_s[0] > at_s for one in started) for at_s in removed_s]
    yield str(max(late, default=0))
    yield f"{max(one.ttft_s for one in started):.1f}"
    good = [one.served and not one.missed for one in lives if one.slo is not None]
    yield f"{sum(good) / len(good):.3f}" if good else "-"


def main() -> None:
    print(
        "| load | engines at first | engines asked for, at s | waiting at a removal | longest TTFT s | objectives met |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for load in LOADS:
        for engines in (1, MAX_ENGINES):
            print("|", " | ".join(row(load, engines)), "|", flush=True)


if __name__ == "__main__":
    main()
