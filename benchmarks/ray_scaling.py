"""A deployment on Ray whose number of engines follows a step in the load, up and down; priced engines, real HTTP.

    python -m benchmarks.ray_scaling [--engines 1-3] [--rates 4,16,4] [--seconds 30,70,70] [--scale-down-after 20]
                                     [--json FILE]

Setup scorpio-8b, as in `benchmarks.routed_priced`: requests of six classes of objectives, `--rates` a second one after
the other, each for as long as `--seconds` says. For each rate: `adherence`: the share of its requests that kept their
objectives, and of the last half of them; `engines`: those that took requests, at first, most, and at last; `changes`:
when their number changed, in seconds after the rate began. Needs the ray and bench extras.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.faults.server import until
from benchmarks.fleet_load import Seen, adherence, arrivals_of, machine_options, planned, put, write_cost
from benchmarks.ray_cluster import RayCluster
from roseinfer.bench.report import header, host, table, write_json
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.workload import Arrival

MEAN_LEN = 400.0
LOOK_S = 0.5
# What is seen: seconds after the load began, and the engines that took requests then.
Sizes = list[tuple[float, int]]


def arrivals(rates: Sequence[float], seconds: Sequence[float]) -> list[Arrival]:
    found: list[Arrival] = []
    for number, (rate, begins_s, lasts_s) in enumerate(
        zip(rates, accumulate(seconds, initial=0.0), seconds, strict=False)
    ):
        for each in arrivals_of(SCORPIO_8B, rate, int(2 * rate * lasts_s) + 10, number):
            if each.at_s < lasts_s:
                found.append(replace(each, at_s=begins_s + each.at_s))
    return found


def ready_engines(cluster: RayCluster) -> int:
    status, body = cluster.get("/ready")
    return sum(each["state"] == "ready" for each in json.loads(body)["engines"]) if status == 200 else 0


def run(cluster: RayCluster, load: Sequence[Arrival], until_s: float) -> tuple[list[Seen], Sizes]:
    sizes: Sizes = []

    async def watch(began_s: float) -> None:
        while time.monotonic() < began_s + until_s:
            size = await asyncio.to_thread(ready_engines, cluster)
            sizes.append((time.monotonic() - began_s, size))
            await asyncio.sleep(LOOK_S)

    seen = asyncio.run(put(cluster.url, planned(load, SCORPIO_8B.machine.max_model_len, MEAN_LEN), meanwhile=watch))
    return seen, sizes


def row(rate: float, begins_s: float, ends_s: float, seen: Sequence[Seen], sizes: Sizes) -> dict[str, Any]:
    its = [each for each in seen if begins_s <= each.due_s < ends_s]
    counts = [(at_s, size) for at_s, size in sizes if begins_s <= at_s < ends_s]
    changes = [
        f"{size} after {at_s - begins_s:.0f} s" for (_, before), (at_s, size) in pairwise(counts) if size != before
    ]
    return {
        "rate": f"{rate:g}/s",
        "requests": len(its),
        "failed": sum(each.failed for each in its),
        "adherence": f"{adherence(its):.3f}",
        "last half": f"{adherence(its[len(its) // 2 :]):.3f}",
        "engines": f"{counts[0][1]}, {max(size for _, size in counts)}, {counts[-1][1]}",
        "changes": ", ".join(changes),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="1-3")
    parser.add_argument("--rates", default="4,16,4")
    parser.add_argument("--seconds", default="30,70,70")
    parser.add_argument("--scale-down-after", type=float, default=20.0)
    parser.add_argument("--json")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    print(header("a deployment on Ray that follows its load", vars(args), host()), flush=True)
    rates, seconds = ([float(text) for text in given.split(",")] for given in (args.rates, args.seconds))
    least, most = args.engines.split("-")
    with RayCluster() as cluster:
        flags = machine_options(SCORPIO_8B, write_cost(SCORPIO_8B, Path(cluster.folder) / "cost.json"), MEAN_LEN)
        flags += ["--port", str(cluster.port), "--engines", least, "--min-engines", least, "--max-engines", most]
        done = cluster.deploy(*flags, "--scale-down-after", str(args.scale_down_after))
        assert done.returncode == 0, done.stderr
        assert until(lambda: cluster.ready(int(least))), cluster.get("/ready")
        seen, sizes = run(cluster, arrivals(rates, seconds), sum(seconds))
    bounds = list(accumulate(seconds, initial=0.0))
    rows = [row(rate, *span, seen, sizes) for rate, span in zip(rates, pairwise(bounds), strict=True)]
    print(table(rows))
    if args.json:
        write_json(args.json, {"rates": rows}, vars(args), host())


if __name__ == "__main__":
    main()
