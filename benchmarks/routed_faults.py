"""A fleet under load while engines are restarted or killed, over real HTTP with priced engines.

    python -m benchmarks.routed_faults [--replicas 4] [--rate 18] [--requests 900] [--cases none,roll,kill,freeze]
                                       [--scale 1] [--json FILE]

Setup scorpio-8b, as in `benchmarks.routed_priced`; --rate is the total. Each case is a server of its own and the same
load; a third of the way in
* `none`: nothing happens, for comparison;
* `roll`: SIGHUP: engines are restarted one after the other;
* `kill`: SIGKILL of the engine that has the most requests;
* `freeze`: SIGSTOP of one, and SIGCONT 15 s later.

`failed`: requests that neither ended well nor were refused for their objectives; must be 0. `lost text`: streams whose
text is not what `none` gave the same request, although both were served. `after`: adherence of the requests that came
within 10 s of the event, and `back s`: how long after the event the last of ten-request windows was that kept less than
the whole of `none` less 5 points. `counted`: requests in `slo_requests_total`; must be all. Needs the bench extra.
"""

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.faults.server import ServerUnderTest, until
from benchmarks.fleet_load import (
    Seen,
    adherence,
    arrivals_of,
    machine_options,
    parse_cases,
    planned,
    put,
    samples,
    scaled,
    server_adherence,
    summary,
    write_cost,
)
from roseinfer.bench.report import header, host, table, write_json
from roseinfer.sim.setups import SCORPIO_8B

MEAN_LEN = 400.0
CASES = ("none", "roll", "kill", "freeze")
FROZEN_S = 15.0
AFTER_S = 10.0
WINDOW, TOLERANCE = 10, 0.05
BACK_PATIENCE_S = 60.0


def busiest(server: ServerUnderTest) -> int:
    """The engine process that has spent the most CPU time: with engines alike it has the most requests."""

    def spent(pid: int) -> int:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]))

    return max(server.engines(), key=spent)


def event(case: str, server: ServerUnderTest, at_s: float) -> Callable[[float], Awaitable[None]]:
    """What happens `at_s` after the load began."""

    async def happens(began_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        if case == "roll":
            os.kill(server.process.pid, signal.SIGHUP)
        elif case == "kill":
            os.kill(busiest(server), signal.SIGKILL)
        elif case == "freeze":
            engine = busiest(server)
            os.kill(engine, signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)
            if Path(f"/proc/{engine}").exists():
                os.kill(engine, signal.SIGCONT)

    return happens


def one(case: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[Seen]]:
    setup = scaled(SCORPIO_8B, args.scale)
    arrivals = arrivals_of(setup, args.rate, args.requests, args.seed, scale=args.scale)
    load = planned(arrivals, setup.machine.max_model_len, MEAN_LEN)
    at_s = arrivals[len(arrivals) // 3].at_s
    with tempfile.TemporaryDirectory(prefix="routed-") as folder:
        flags = machine_options(setup, write_cost(setup, Path(folder) / "cost.json"), MEAN_LEN)
        flags += ["--replicas", str(args.replicas), "--router", args.router, "--api-workers", str(args.workers)]
        with ServerUnderTest(*flags, "--log-level", "warning") as server:
            before = server.engines()
            seen = asyncio.run(put(server.url, load, texts=True, meanwhile=event(case, server, at_s)))
            metrics = server.get("/metrics")[1]
            complete = until(lambda: len(server.engines()) == args.replicas, BACK_PATIENCE_S)
            renewed = len(set(server.engines()) - set(before))
            idle = until(server.idle, 20.0)
            log = server.log()
    found = {
        "case": case,
        **summary(seen),
        "server": server_adherence(metrics),
        "after": adherence([each for each in seen if at_s <= each.due_s < at_s + AFTER_S]),
        "counted": int(sum(value for _, value in samples(metrics, "roseinfer:slo_requests_total"))),
        "engines": f"{args.replicas if complete else len(before)} ({renewed} new)",
        "idle": idle,
        "event_s": at_s,
        "log": log[-4000:],
        "errors": sorted({f"{each.status} {each.error}" for each in seen if each.failed})[:5],
    }
    return found, seen


def back_s(seen: Sequence[Seen], at_s: float, wanted: float) -> float:
    """Seconds from the event until windows of requests, in order of arrival, keep what is wanted for good."""
    later = [each for each in seen if each.due_s >= at_s]
    last = 0.0
    for first in range(0, len(later) - WINDOW + 1, WINDOW):
        window = later[first : first + WINDOW]
        if adherence(window) < wanted:
            last = window[-1].due_s - at_s
    return last


def same_texts(seen: Sequence[Seen], wanted: Sequence[Seen]) -> int:
    """Requests of which both runs served all, with different texts."""
    pairs = zip(seen, wanted, strict=True)
    return sum(a.ok and b.ok and (a.text, a.finish_reason) != (b.text, b.finish_reason) for a, b in pairs)


def compare(found: dict[str, Any], seen: Sequence[Seen], base: Sequence[Seen]) -> None:
    found["lost text"] = same_texts(seen, base)
    usual = fmean(adherence(base[first : first + WINDOW]) for first in range(0, len(base), WINDOW))
    found["back s"] = round(back_s(seen, found["event_s"], usual - TOLERANCE - 1 / WINDOW), 1)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--router", default="pace")
    parser.add_argument("--workers", type=int, default=1, help="API processes")
    parser.add_argument("--rate", type=float, default=18.0)
    parser.add_argument("--requests", type=int, default=900)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parse_cases(parser, CASES, argv)


def main() -> None:
    args = parse()
    print(header("a fleet and its faults", vars(args), host()), flush=True)
    results = {case: one(case, args) for case in args.cases}
    base = results.get("none", next(iter(results.values())))[1]
    for found, seen in results.values():
        compare(found, seen, base)
    hidden = ("log", "errors", "event_s", "TTFT p50 ms")
    shown = [{name: value for name, value in found.items() if name not in hidden} for found, _ in results.values()]
    print(
        table(
            [{name: f"{v:.3f}" if isinstance(v, float) and v <= 1 else v for name, v in row.items()} for row in shown]
        )
    )
    for found, _ in results.values():
        for text in [*found["errors"], *found["log"].splitlines()[-12:]]:
            print(f"  {found['case']}: {text[:300]}")
    if args.json:
        write_json(args.json, {"cases": [found for found, _ in results.values()]}, vars(args), host())


def _shown(value: Any) -> Any:
    return f"{value:.3f}" if isinstance(value, float) and value <= 1 else value


if __name__ == "__main__":
    main()
