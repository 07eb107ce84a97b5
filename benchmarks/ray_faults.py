"""A deployment on Ray under load while its parts are killed one after the other; priced engines, real HTTP.

    python -m benchmarks.ray_faults [--engines 2] [--api-replicas 2] [--rate 8] [--seconds 20] [--output 60]
                                    [--cases engine,actor,api,directory] [--json FILE]

One cluster of one node with token authentication. Each case is the same load of seeded streams, `--rate` a second for
`--seconds`, and a third of the way in SIGKILL of
* `none`: nothing, for comparison;
* `engine`: the process of an engine, which its keeper starts again;
* `actor`: the actor that keeps an engine, which ends with it: Ray Serve starts another, which is another engine;
* `api`: an API process: the streams that it carried are cut, and no other;
* `directory`: the actor that says which engines there are.

`ended well`: streams with all their tokens; `cut`: those that ended without; `refused`: those that got no answer, or
another than 200; `other text`: streams whose text is not what `none` gave the same request. `longest pause`: between
two tokens of any stream. `after`: requests sent after the event, and how many of them ended well. `back`: seconds until
as many engines, API processes and directories ran as before. Needs the ray and bench extras.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.faults.server import until
from benchmarks.fleet_load import Planned, Seen, parse_cases, put
from benchmarks.ray_cluster import API_ACTOR, DIRECTORY, ENGINE, ENGINE_ACTOR, RayCluster
from roseinfer.bench.report import header, host, table, write_json

CASES = ("none", "engine", "actor", "api", "directory")
NAMES = {"engine": ENGINE, "actor": ENGINE_ACTOR, "api": API_ACTOR, "directory": DIRECTORY}
BACK_PATIENCE_S = 90.0


def load(rate: float, seconds: float, output: int, seed: int = 0) -> list[Planned]:
    """Streams of `output` tokens with seeds of their own, at random times."""
    draw = random.Random(seed)
    found: list[Planned] = []
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        number = len(found)
        body = {
            "prompt": [draw.randrange(10, 500) for _ in range(50)],
            "max_tokens": output,
            "ignore_eos": True,
            "seed": number,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        found.append(Planned(at_s, json.dumps(body).encode()))
    return found


def victim(cluster: RayCluster, case: str) -> int:
    """The process that is killed."""
    return cluster.processes(NAMES[case])[0]


def run(cluster: RayCluster, case: str, planned: Sequence[Planned], at_s: float) -> tuple[list[Seen], float]:
    """What clients saw, and the seconds until all was there again. `case`: or several, joined by +."""
    before = {name: len(cluster.processes(name)) for name in NAMES.values()}
    times = [0.0]

    async def kill(began_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        if case != "none":
            times.append(await asyncio.to_thread(killed))

    def killed() -> float:
        pids, killed_s = [victim(cluster, each) for each in case.split("+")], time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

        def back() -> bool:
            now = {name: cluster.processes(name) for name in NAMES.values()}
            whole = all(len(now[name]) == count for name, count in before.items())
            gone = not any(pid in running for pid in pids for running in now.values())
            return whole and gone and cluster.ready(before[ENGINE])

        assert until(back, BACK_PATIENCE_S), f"not back after {case}"
        return time.monotonic() - killed_s

    return asyncio.run(put(cluster.url, planned, texts=True, meanwhile=kill)), times[-1]


def summary(case: str, seen: Sequence[Seen], base: Sequence[Seen], at_s: float, back_s: float) -> dict[str, Any]:
    """A row of the table."""
    after = [each for each in seen if each.due_s > at_s]
    pauses = [later - earlier for each in seen if each.ok for earlier, later in pairwise(each.chunk_s)]
    started = [each for each in seen if each.chunk_s]
    return {
        "killed": case,
        "requests": len(seen),
        "ended well": sum(map(well, seen)),
        "cut": sum(not well(each) for each in started),
        "refused": len(seen) - len(started),
        "other text": sum(well(a) and well(b) and a.text != b.text for a, b in zip(seen, base, strict=True)),
        "longest pause": f"{max(pauses, default=0.0):.2f} s",
        "after": f"{sum(map(well, after))} of {len(after)}",
        "back": f"{back_s:.1f} s",
    }


def well(seen: Seen) -> bool:
    return seen.ok and seen.error is None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--api-replicas", type=int, default=2)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", type=int, default=60)
    return parse_cases(parser, CASES, argv)


def main() -> None:
    args = parse()
    print(header("a deployment on Ray and its faults", vars(args), host()), flush=True)
    planned, at_s = load(args.rate, args.seconds, args.output), args.seconds / 3
    rows, base = [], None
    with RayCluster() as cluster:
        counts = ("--engines", str(args.engines), "--api-replicas", str(args.api_replicas))
        done = cluster.deploy(*cluster.options(*counts))
        assert done.returncode == 0, done.stderr
        assert until(lambda: cluster.ready(args.engines)), cluster.get("/ready")
        for case in args.cases:
            seen, back_s = run(cluster, case, planned, at_s)
            base = base or seen
            rows.append(summary(case, seen, base, at_s, back_s))
            for error in sorted({f"{each.status} {each.error}" for each in seen if not well(each)}):
                print(f"  {case}: {error[:200]}", flush=True)
    print(table(rows))
    if args.json:
        write_json(args.json, {"cases": rows}, vars(args), host())


if __name__ == "__main__":
    main()
