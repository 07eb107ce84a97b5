"""Compare scheduling policies on random loads: the first of the policies with the best of the others.

    python -m benchmarks.research.grid --random-loads 200 --seed 1 [--traces DIR] [--cache DIR] [--json FILE]

docs/research/2026-11-random-loads.md ("Random loads") describes the loads and the table.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from benchmarks.research.evaluation import POLICIES, Grid, check_grid, run_grid
from roseinfer.bench.report import table
from roseinfer.cli.commands import Command
from roseinfer.cli.commands.groups import POLICY, SCHEDULER, scheduler_options
from roseinfer.cli.commands.simulate import POLICY_KNOWLEDGE_OPTIONS, SINGLE_RUN_OPTIONS
from roseinfer.cli.main import run_alone
from roseinfer.config.options import Group, OptionSet
from roseinfer.config.parser import OptionParser
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GridConfig:
    """Options of the grid."""

    random_loads: int = option(200, "number of loads")
    seed: int = option(0, "seed of the loads")
    policies: str = option(",".join(POLICIES), "compare the first policy with the others", metavar="NAMES")
    traces: str | None = option(
        None, "directory of the Azure traces; default: skip the loads that need one", metavar="DIR"
    )
    cache: str | None = option(None, "directory of results, reused while their inputs are unchanged", metavar="DIR")
    jobs: int | None = option(None, "processes; default: one per core")
    json: str | None = option(None, "write the result to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_positive(self, "random_loads", "jobs")
        if self.traces is not None and not Path(self.traces).is_dir():
            raise ConfigError(f"traces: no directory {self.traces!r}")


NAME = "grid"
HELP = "compare scheduling policies on random loads"
OPTIONS = OptionSet(
    Group(GridConfig, "random loads"),
    replace(SCHEDULER, skip=SCHEDULER.skip | {*SINGLE_RUN_OPTIONS}),
    Group(POLICY.kind, POLICY.title, skip=POLICY_KNOWLEDGE_OPTIONS),
)


def configure(parser: OptionParser) -> None:
    """All options are in OPTIONS."""


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    config = OPTIONS.build(GridConfig, given)
    grid = Grid(
        seed=config.seed,
        count=config.random_loads,
        traces=config.traces,
        policies=[name.strip() for name in config.policies.split(",") if name.strip()],
        given=scheduler_options(given),
        cache=config.cache,
        jobs=config.jobs or os.cpu_count() or 1,
    )
    check_grid(grid)
    result = run_grid(grid)
    print_grid(result)
    if config.json:
        Path(config.json).write_text(json.dumps({**result, "args": given}, indent=2, default=str) + "\n")
    return 0


def print_grid(result: Mapping[str, Any]) -> None:
    """Print loads, worst first, then the summary and the late share by kind."""
    judged, *_ = result["policies"]
    rows = [
        {
            "load": entry["number"],
            judged: f"{entry['adherence']:.3f}",
            "best other": f"{entry['best_other']:.3f}",
            "who": entry["who"],
            "ratio": f"{entry['ratio']:.3f}",
            "goodput": f"{entry['goodput_ratio']:.3f}",
            "late": f"{entry['late']:.1%}",
            "of bound": f"{entry['of_bound']:.3f}",
            "requests": entry["requests"],
            "kinds": "+".join(entry["kinds"]),
        }
        for entry in result["loads"]
    ]
    head, *lines = table(rows).splitlines()
    print(head)
    for line, entry in zip(lines, result["loads"], strict=False):
        print(f"{line}  {entry['description']}")
    for name, title in (("ratio", "adherence"), ("goodput_ratio", "goodput")):
        found = result["summary"][name]
        if found["even"] is not None:
            told = f"worst {found['worst']:.3f}, median {found['median']:.3f}"
            print(f"{title}: at least .99 of the best other's on {found['even']:.1%} of {len(rows)} loads; {told}")
    if result["left_out"]:
        print(f"left out: {len(result['left_out'])} loads that need a trace (--traces DIR)")
    print(f"late among the served of {judged}, pooled over loads of a kind:")
    print(table(_late_rows(result["late"])))


def _late_rows(pools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per kind and a column per group of classes; in brackets where too few were served."""
    kinds = dict.fromkeys(pool["kind"] for pool in pools)
    groups = sorted(
        {pool["of"] for pool in pools}, key=lambda group: (group != "all", group.startswith("class "), group)
    )
    rows: dict[str, dict[str, Any]] = {kind: {"kind": kind, **dict.fromkeys(groups)} for kind in kinds}
    for pool in pools:
        share = f"{pool['share']:.2%}"
        rows[pool["kind"]][pool["of"]] = share if pool["enough"] else f"({share})"
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> int:
    return run_alone(cast(Command, sys.modules[__name__]), "python -m benchmarks.research.grid", argv)


if __name__ == "__main__":
    sys.exit(main())
