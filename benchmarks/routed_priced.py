"""Routers over real HTTP, beside the simulator: priced engines, the same arrivals, lengths, objectives and hints.

    python -m benchmarks.routed_priced [--replicas 4] [--rates 36] [--slow 1,1,1,1.5] [--routers pace,least]
                                       [--requests 1600] [--seeds 1] [--together N] [--scale 1] [--json FILE]

A case is a router, a load and a seed. Each load is put on `serve --replicas N --device priced` with every router: once
on engines that are alike, and, with --slow, once on engines of which some are slower. Setup scorpio-8b: an A100 with an
8B model, lengths of ShareGPT, six classes; clients say how long their outputs will be as well as SCORPIO's predictor.
Adherence as clients see it, as the server counts it, and as the simulator has it for the same requests.

Rates are totals. --cv: gaps of the arrivals are gamma-distributed with this coefficient of variation (1 = Poisson).
--together: so many cases at a time, each with a server and a client of its own: a case takes about one core at 36
requests a second. --scale 4 makes steps, gaps and objectives 4 times as long, for machines with fewer cores: the
simulator is then given the same. "late" says whether the client kept up. Needs the bench extra.
"""

import argparse
import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.faults.server import ServerUnderTest
from benchmarks.fleet_load import (
    arrivals_of,
    machine_options,
    planned,
    put,
    samples,
    scaled,
    server_adherence,
    summary,
    write_cost,
)
from roseinfer.bench.report import header, host, table, write_json
from roseinfer.core.config.option import positive_numbers
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import CalibratedLengths, EcdfLengths
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.fleet_plan import FleetPlan
from roseinfer.sim.fleets import simulate_fleet
from roseinfer.sim.report import adherence
from roseinfer.sim.setups import SCORPIO_8B

MEAN_LEN = 400.0  # of the law that lengths are looked for in
SLICES = 3  # of a run's requests, of which the middle is told apart: fleets begin and end empty


@dataclass(frozen=True, slots=True)
class Case:
    """`rate`: of all engines together. `slow`: a factor for each engine, empty: all alike."""

    router: str
    rate: float
    slow: tuple[float, ...]
    seed: int
    replicas: int
    requests: int
    cv: float
    scale: float
    overlap: bool

    @property
    def load(self) -> str:
        return f"{self.rate:g}/s" + (f" slow {','.join(f'{factor:g}' for factor in self.slow)}" if self.slow else "")

    @property
    def options(self) -> dict[str, Any]:
        return {**SCORPIO_8B.scheduler, "scheduling_policy": "slack", "overlap": self.overlap}


def cases(args: argparse.Namespace) -> list[Case]:
    slow = positive_numbers("slow", args.slow)
    found = []
    for seed in range(args.seeds):
        for rate in positive_numbers("rates", args.rates):
            for factors in ((), slow) if slow else ((),):
                for router in args.routers.split(","):
                    own = (args.replicas, args.requests, args.cv, args.scale, args.overlap)
                    found.append(Case(router.strip(), rate, factors, seed, *own))
    return found


def over_http(case: Case) -> dict[str, Any]:
    """One case against a server of its own. Called in a process of its own."""
    setup = scaled(SCORPIO_8B, case.scale)
    arrivals = arrivals_of(setup, case.rate, case.requests, case.seed, case.cv, case.scale)
    load = planned(arrivals, setup.machine.max_model_len, MEAN_LEN)
    with tempfile.TemporaryDirectory(prefix="routed-") as folder:
        cost = write_cost(setup, Path(folder) / "cost.json")
        flags = machine_options(setup, cost, MEAN_LEN)
        flags += ["--overlap" if case.overlap else "--no-overlap", "--max-num-queued-reqs", "10000"]
        if case.replicas > 1:
            flags += ["--replicas", str(case.replicas), "--router", case.router]
        if case.slow:
            flags += ["--slow", ",".join(map(str, case.slow))]
        with ServerUnderTest(*flags, "--api-workers", "1", "--log-level", "warning") as server:
            seen = asyncio.run(put(server.url, load))
            metrics = server.get("/metrics")[1]
            log = server.log()
    third = len(seen) // SLICES
    return {
        **summary(seen),
        "middle": fmean(each.good for each in seen[third : 2 * third]),
        "server": server_adherence(metrics),
        "reasons": reasons(metrics),
        "errors": sorted({each.error or "" for each in seen if each.failed})[:3],
        "log": log[-2000:],
    }


def reasons(metrics: str) -> str:
    """Placements by why they were made, most frequent first."""
    found: Counter[str] = Counter()
    for labels, value in samples(metrics, "roseinfer:router_placements_total"):
        found[labels["reason"]] += int(value)
    return ", ".join(f"{reason} {count}" for reason, count in found.most_common())


def simulated(case: Case) -> dict[str, Any]:
    setup = scaled(SCORPIO_8B, case.scale)
    arrivals = arrivals_of(setup, case.rate, case.requests, case.seed, case.cv, case.scale)
    cost = setup.machine.cost

    def estimates(seed: int) -> Estimates:
        return Estimates(cost=CostModel(cost), lengths=CalibratedLengths(EcdfLengths(seed)))

    plan = FleetPlan(case.replicas, case.router, case.slow)
    run = simulate_fleet(arrivals, scheduler_config(**case.options), setup.machine, plan, estimates, case.seed)
    lives = run.simulation.lifetimes
    third = len(lives) // SLICES
    return {"adherence": adherence(lives), "middle": adherence(lives[third : 2 * third])}


def rows(cases: Sequence[Case], found: Sequence[Mapping[str, Any]], sim: Sequence[Mapping[str, Any]]) -> list[dict]:
    """One for each router and load, means over the seeds."""
    merged: dict[tuple[str, str], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for case, seen, wanted in zip(cases, found, sim, strict=True):
        merged.setdefault((case.load, case.router), []).append((seen, wanted))
    lines = []
    for (load, router), pairs in merged.items():
        line = {"load": load, "router": router, "HTTP": fmean(seen["adherence"] for seen, _ in pairs)}
        line["server"] = fmean(seen["server"] for seen, _ in pairs)
        line["simulated"] = fmean(wanted["adherence"] for _, wanted in pairs)
        for name in ("refused", "failed", "TTFT p50 ms", "TPOT p50 ms", "late ms"):
            line[name] = fmean(seen[name] for seen, _ in pairs)
        lines.append(line)
    return lines


def gains(lines: Sequence[Mapping[str, Any]], base: str = "least") -> list[dict[str, Any]]:
    """Points of adherence that each router has over `base` at each load, over HTTP and simulated."""
    bases = {line["load"]: line for line in lines if line["router"] == base}
    found = []
    for line in lines:
        other = bases.get(line["load"])
        if other is None or line is other:
            continue
        points = {name: 100 * (line[name] - other[name]) for name in ("HTTP", "server", "simulated")}
        told = {"load": line["load"], "gain of": f"{line['router']} over {base}", **points}
        found.append({**told, "apart": points["HTTP"] - points["simulated"]})
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rates", default="36", help="requests a second of all engines together: a,b,...")
    parser.add_argument("--slow", default="1,1,1,1.5", help="factors of the engines of a second fleet; '' for none")
    parser.add_argument("--routers", default="pace,least")
    parser.add_argument("--requests", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cv", type=float, default=1.0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--together", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="cases at a time")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    print(header("routers over HTTP", vars(args), host()), flush=True)
    todo = cases(args)
    with ProcessPoolExecutor(args.together) as pool:
        found = list(pool.map(over_http, todo))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        sim = list(pool.map(simulated, todo))
    lines = rows(todo, found, sim)
    print(_shown(lines))
    print(_shown(gains(lines)))
    for case, seen in zip(todo, found, strict=True):
        for text in [f"placed by {seen['reasons']}", *seen["errors"], *seen["log"].splitlines()[-5:]]:
            print(f"  {case.load} {case.router} seed {case.seed}: {text}")
    if args.json:
        write_json(args.json, {"rows": lines, "gains": gains(lines), "cases": found}, vars(args), host())


def _shown(lines: Sequence[Mapping[str, Any]]) -> str:
    """Adherence with three digits."""
    digits = ("HTTP", "server", "simulated")
    few = [
        {name: f"{value:.3f}" if name in digits and abs(value) <= 1 else value for name, value in line.items()}
        for line in lines
    ]
    return table(few)


if __name__ == "__main__":
    main()
