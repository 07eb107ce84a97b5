"""Measure what each mechanism of `slack` is worth: random loads with and without it.

    python -m benchmarks.research.ablation --random-loads 200 --seed 0 [--without price,pace] [--json FILE]

By default each mechanism is switched off alone. The table shows, in points, how adherence, goodput and the late share
change without it: on average, and on average over the loads of the kind that loses most. Positive differences of
adherence and goodput mean that the policy is better without the mechanism.
"""

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.research import switches
from benchmarks.research.cache import Cache, digest_of, policy_digest
from benchmarks.research.evaluation import load_digest, outcome_of, without_collections
from benchmarks.research.random_loads import RandomLoad, TraceNeededError, draw_load
from benchmarks.research.switches import SWITCHES, without
from roseinfer.bench.report import header, table
from roseinfer.sim.sweep import simulate_as

MIN_LOADS_COUNT = 8  # of a kind whose mean is reported
Outcome = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ablation:
    """Loads 0 to `count` - 1 of a seed. `variants`: the mechanisms that each variant does without."""

    seed: int
    count: int
    variants: Sequence[frozenset[str]]
    traces: str | None = None
    cache: str | None = None


def run_load(ablation: Ablation, number: int) -> dict[str, Any] | None:
    """Return the kinds of a load and the outcome of each variant; None if a trace is missing."""
    try:
        load = draw_load(ablation.seed, number, traces=ablation.traces)
    except TraceNeededError:
        return None
    outcomes = {name_of(off): run_variant(ablation, load, off) for off in ablation.variants}
    return {"number": number, "kinds": kinds_of(load), "description": load.description, "outcomes": outcomes}


def run_variant(ablation: Ablation, load: RandomLoad, off: frozenset[str]) -> Outcome:
    options = {**load.scheduler, "scheduling_policy": "slack"}

    def run() -> Outcome:
        with without(off), without_collections():
            return outcome_of(simulate_as(load.arrivals, load.machine, options, "predictor", load.number))

    if ablation.cache is None:
        return run()
    key = [load_digest(load), sorted(off), policy_digest("slack", with_shared=True), digest_of([switches.__file__])]
    return Cache(ablation.cache).get(key, run)


def kinds_of(load: RandomLoad) -> list[str]:
    """Return the kinds of a load, with its objectives, hints, and level."""
    times = load.choices.load
    level = "up to capacity" if times <= 1 else "1 to 2 times" if times <= 2 else "2 to 3 times"
    objectives = sorted({chosen["objectives"] for chosen in load.choices.of_classes} - {"none"})
    return [*load.kinds, *objectives, f"hints {load.choices.of_load['hints']['kind']}", level]


def name_of(off: Iterable[str]) -> str:
    return ",".join(sorted(off))


def run_ablation(ablation: Ablation, jobs: int) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(jobs) as pool:
        found = pool.map(run_load, repeat(ablation), range(ablation.count))
        return [entry for entry in found if entry is not None]


def rows_of(loads: Sequence[Mapping[str, Any]], variants: Sequence[frozenset[str]]) -> list[dict[str, Any]]:
    """Return a row per variant, the most valuable mechanism first."""
    rows = [_row(loads, name_of(off)) for off in variants if off]
    rows.sort(key=lambda row: float(row["adherence"]))
    return rows


def _row(loads: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    changes = {
        measure: [_change(entry["outcomes"], name, measure) for entry in loads]
        for measure in ("adherence", "goodput", "late")
    }
    by_kind: dict[str, list[float]] = {}
    for entry, change in zip(loads, changes["adherence"], strict=True):
        for kind in entry["kinds"]:
            by_kind.setdefault(kind, []).append(change)
    means = {kind: fmean(found) for kind, found in by_kind.items() if len(found) >= MIN_LOADS_COUNT}
    means = means or {"all": fmean(changes["adherence"])}
    worst, best = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return {
        "without": name,
        "adherence": f"{fmean(changes['adherence']):+.2f}",
        "goodput %": f"{fmean(changes['goodput']):+.1f}",
        "late": f"{fmean(changes['late']):+.2f}",
        "worst kind": f"{means[worst]:+.1f} {worst}",
        "best kind": f"{means[best]:+.1f} {best}",
        "worst load": f"{min(changes['adherence']):+.1f}",
        "best load": f"{max(changes['adherence']):+.1f}",
    }


def _change(outcomes: Mapping[str, Outcome], name: str, measure: str) -> float:
    """Return the difference in points, of goodput in percent."""
    whole, part = outcomes[""], outcomes[name]
    if measure == "goodput":
        before = whole["goodput_req_s"]
        return 100 * (part["goodput_req_s"] / before - 1) if before else 0.0
    return 100 * (_share(part, measure) - _share(whole, measure))


def _share(outcome: Outcome, measure: str) -> float:
    if measure == "adherence":
        return float(outcome["adherence"])
    return outcome["late"] / outcome["served"] if outcome["served"] else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-loads", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", action="append", metavar="NAME,NAME", help="mechanisms to switch off together")
    parser.add_argument("--traces", metavar="DIR")
    parser.add_argument("--cache", metavar="DIR")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    wanted = [frozenset(group.split(",")) for group in args.without or SWITCHES]
    for name in sorted(frozenset().union(*wanted) - SWITCHES.keys()):
        parser.error(f"unknown mechanism {name!r}; use {', '.join(SWITCHES)}")
    ablation = Ablation(args.seed, args.random_loads, [frozenset(), *wanted], args.traces, args.cache)
    loads = run_ablation(ablation, args.jobs)
    print(header("ablation", {"loads": len(loads), "seed": args.seed}))
    adherence = fmean([entry["outcomes"][""]["adherence"] for entry in loads])
    late = fmean([_share(entry["outcomes"][""], "late") for entry in loads])
    print(f"slack: adherence {adherence:.4f}, late {late:.4f} (means of loads)")
    print(table(rows_of(loads, ablation.variants)))
    if args.json:
        Path(args.json).write_text(json.dumps({"seed": args.seed, "loads": loads}, indent=1) + "\n")


if __name__ == "__main__":
    main()
