"""What a streamed token costs in processor time behind HAProxy on Ray, against `serve`; priced engines, real HTTP.

    python -m benchmarks.ray_cost [--streams 32] [--output 300] [--rounds 3] [--json FILE]

The same load for `serve --replicas 2` with one process and for a deployment with one API process: `--streams` at once,
each of `--output` tokens, one in 20 ms. What of it are connections to engines over TCP, `benchmarks.remote_cost` says.
 `API`, `HAProxy`: microseconds of the processor that a token costs these processes, the least of
`--rounds`, user and system; `first`: milliseconds to the first token of a request that comes alone, median of 50.
`engines`: the processes of both engines. Needs the ray and bench extras.
"""

import argparse
import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.faults.server import ServerUnderTest, until
from benchmarks.fleet_load import Planned, put
from benchmarks.ray_cluster import API_ACTOR, ENGINE, HAPROXY, RayCluster
from benchmarks.ray_faults import load, well
from roseinfer.bench.report import header, host, table, write_json

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
Pids = Callable[[], list[int]]


def cpu_s(pids: Sequence[int]) -> float:
    """Seconds of the processor that they have taken, ever."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) * TICK_S


def measured(url: str, args: argparse.Namespace, parts: dict[str, Pids]) -> dict[str, Any]:
    at_once = [Planned(0.0, each.body) for each in load(1000.0, 10.0, args.output)[: args.streams]]
    alone = [Planned(0.1 * number, each.body) for number, each in enumerate(load(1000.0, 10.0, 2)[:50])]
    firsts = [each.ttft_s for each in asyncio.run(put(url, alone)) if well(each)]
    costs: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(args.rounds):
        before = {name: cpu_s(pids()) for name, pids in parts.items()}
        seen = asyncio.run(put(url, at_once))
        assert all(map(well, seen)), [each.error for each in seen]
        tokens = sum(each.output_tokens for each in seen)
        for name, pids in parts.items():
            costs[name].append((cpu_s(pids()) - before[name]) / tokens * 1e6)
    return {
        **{f"{name} us": f"{min(found):.0f}" for name, found in costs.items()},
        "first ms": f"{median(firsts) * 1e3:.1f}",
    }


def serve(args: argparse.Namespace, cost: Path) -> dict[str, Any]:
    options = ("--device", "priced", "--cost", str(cost), "--replicas", "2", "--api-workers", "1")
    with ServerUnderTest(*options, "--log-level", "warning") as server:
        return measured(server.url, args, {"API": lambda: [server.process.pid], "engines": server.engines})


def deployed(args: argparse.Namespace, cluster: RayCluster) -> dict[str, Any]:
    done = cluster.deploy(*cluster.options("--engines", "2", "--log-level", "warning"))
    assert done.returncode == 0, done.stderr
    assert until(lambda: cluster.ready(2)), cluster.get("/ready")
    names = {"API": API_ACTOR, "HAProxy": HAPROXY, "engines": ENGINE}
    return measured(cluster.url, args, {part: partial(cluster.processes, name) for part, name in names.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    print(header("a token's cost on Ray", vars(args), host()), flush=True)
    with RayCluster() as cluster:
        rows = [{"way": "serve --replicas 2", **serve(args, cluster.cost)}]
        rows.append({"way": "deploy", **deployed(args, cluster)})
    print(table([{"way": "", "API us": "", "HAProxy us": "", "engines us": "", "first ms": ""} | row for row in rows]))
    if args.json:
        write_json(args.json, {"ways": rows}, vars(args), host())


if __name__ == "__main__":
    main()
