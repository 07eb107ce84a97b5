"""Several hosts on one machine: what streams see when one of them is cut off, freezes, or dies with its engine.

    python -m benchmarks.lost_hosts [--hosts 2] [--streams 24] [--cases none,cut,...] [--json FILE]

Each host is a network of its own with `roseinfer engine` in it (a priced engine, 20 ms a step), the clock of the first
one an hour ahead; `roseinfer serve --engines` is in front of them. `--streams` long streams begin at once, and short
ones follow five times a second. After 3 s something happens to the first host:
* `none`: nothing, for comparison;
* `cut`: packets in both directions are lost, for less than --stall-timeout; `back`: those from there;
* `gone`: as `cut`, for longer than --stall-timeout, so that the connection is given up;
* `kill`: SIGKILL of all its processes; the host is there again after 2 s;
* `power`: the same with the network cut before, so that nothing says so;
* `freeze`: SIGSTOP of all its processes, for less than --stall-timeout; `sleep`: for longer;
* `stop`: SIGTERM of its keeper, which is started again when it has ended; `renew`: SIGHUP: its engine is started anew.
  Requests may end there for 2 s.

`wrong`: streams that did not end well; `other text`: than with `none`; both must be 0. `counted`: requests in
`slo_requests_total`; must be all. `moved`: streams that went on elsewhere. `pause`: the longest gap in a stream that
had one of more than half a second. `back s`: from when the host is well again until it gets requests. `held`: requests
and KV blocks in any engine when the server is idle; must be 0.

Linux with `unshare`, `nsenter` and `ip`; root, or namespaces for users. Needs the bench extra. Exit code 1 if something
is not as it should be.
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.faults.server import ServerUnderTest, until
from benchmarks.fleet_load import Planned, Seen, parse_cases, put, samples
from benchmarks.lost_hosts.host import DistantHost, isolate
from roseinfer.bench.report import header, host, percentile, table, write_json
from roseinfer.core.slo import Slo
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams

CASES = ("none", "cut", "back", "gone", "kill", "power", "freeze", "sleep", "stop", "renew")
AT_S = 3.0  # when it happens
COST = CostParams(step_s=0.02, token_s=2e-5, row_s=2e-5, context_s=1e-9)
LONG, SHORT = 600, 25  # tokens
SHORT_EVERY_S, SHORT_FOR_S = 0.2, 14.0
ENGINE_TIMEOUT_S, STALL_TIMEOUT_S, DRAIN_TIMEOUT_S = 2.0, 6.0, 2.0
BRIEFLY_S, LONG_ENOUGH_S, REBOOT_S = 4.0, 9.0, 2.0
AHEAD_S = 3600
PAUSE_S = 0.5
BACK_PATIENCE_S = 40.0
SLO = Slo(ttft_s=2.0, tpot_s=0.1)


def load(streams: int) -> list[Planned]:
    long = [(0.02 * number, LONG) for number in range(streams)]
    short = [(SHORT_EVERY_S * number, SHORT) for number in range(int(SHORT_FOR_S / SHORT_EVERY_S))]
    return [_planned(number, at_s, tokens) for number, (at_s, tokens) in enumerate([*long, *short])]


def _planned(number: int, at_s: float, tokens: int) -> Planned:
    body = {
        "prompt": [3 + number, *range(10, 90)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        "slo": {"ttft_ms": 1e3 * SLO.ttft_s, "tpot_ms": 1e3 * SLO.tpot_s},  # type: ignore[operator]
    }
    return Planned(at_s, json.dumps(body).encode(), SLO)


class Scene:
    """A case as it happens. `well_s`: when the host was well again, on the monotonic clock; `back_s`: how much later it
    got requests.
    """

    def __init__(self, case: str, first: DistantHost) -> None:
        self.case = case
        self.well_s = self.back_s = 0.0
        self._first = first

    async def happen(self, began_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + AT_S - time.monotonic()))
        if self.case != "none":
            await getattr(self, f"_{self.case}")()
        self.well_s = time.monotonic()

    async def _cut(self, seconds: float = BRIEFLY_S, **which: bool) -> None:
        self._first.cut(**which)
        await asyncio.sleep(seconds)
        self._first.mend()

    async def _back(self) -> None:
        await self._cut(there=False)

    async def _gone(self) -> None:
        await self._cut(LONG_ENOUGH_S)

    async def _kill(self) -> None:
        self._first.kill()
        await asyncio.sleep(REBOOT_S)
        await asyncio.to_thread(self._first.start)

    async def _power(self) -> None:
        self._first.cut()
        await self._kill()
        self._first.mend()

    async def _freeze(self, seconds: float = BRIEFLY_S) -> None:
        self._first.freeze()
        await asyncio.sleep(seconds)
        self._first.wake()

    async def _sleep(self) -> None:
        await self._freeze(LONG_ENOUGH_S)

    async def _stop(self) -> None:
        await asyncio.to_thread(self._first.close)
        await asyncio.to_thread(self._first.start)

    async def _renew(self) -> None:
        self._first.renew()
        await asyncio.sleep(1.0)  # it drains by then


def one(case: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[Seen]]:
    planned = load(args.streams)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lost-hosts-")))
        hosts = _hosts(args.hosts, folder)
        for each in hosts:
            stack.callback(each.close)
            each.start()
        scene = Scene(case, hosts[0])
        flags = ["--engines", ",".join(each.address for each in hosts), "--secret-file", str(folder / "secret")]
        flags += ["--engine-timeout", str(ENGINE_TIMEOUT_S), "--stall-timeout", str(STALL_TIMEOUT_S)]
        flags += ["--model", "tiny", "--api-workers", str(args.workers), "--log-level", "warning"]
        with ServerUnderTest(*flags) as server:
            _until_all_take(server, args.hosts)
            seen = asyncio.run(put(server.url, planned, texts=True, meanwhile=_beside(scene, server, args.hosts)))
            idle = until(server.idle, 30.0)
            metrics = server.get("/metrics")[1]
            held = 0 if idle else sum(server.gauges()[:2])
            log = server.log()
    return {**told(case, seen, metrics), "back s": scene.back_s, "held": held, "log": log[-3000:]}, seen


def _beside(scene: Scene, server: ServerUnderTest, hosts: int) -> Callable[[float], Awaitable[None]]:
    async def happen(began_s: float) -> None:
        await scene.happen(began_s)
        if scene.case != "none":
            await asyncio.to_thread(_until_all_take, server, hosts)
            scene.back_s = round(time.monotonic() - scene.well_s, 2)

    return happen


def _until_all_take(server: ServerUnderTest, hosts: int) -> None:
    def all_take() -> bool:
        status, text = server.get("/ready")
        return status == 200 and [each["state"] for each in json.loads(text)["engines"]] == ["ready"] * hosts

    if not until(all_take, BACK_PATIENCE_S):
        raise RuntimeError(f"not all engines take requests: {server.get('/ready')}, {server.log()[-2000:]}")


def _hosts(count: int, folder: Path) -> list[DistantHost]:
    secret, cost = folder / "secret", folder / "cost.json"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    cost.write_text(json.dumps(cost_as_json(COST)))
    options = ["tiny", "--device", "priced", "--cost", str(cost), "--secret-file", str(secret)]
    options += ["--drain-timeout", str(DRAIN_TIMEOUT_S), "--log-level", "warning"]
    return [
        DistantHost(number, options, folder / f"host{number}.log", 0 if number else AHEAD_S) for number in range(count)
    ]


def told(case: str, seen: Sequence[Seen], metrics: str) -> dict[str, Any]:
    gaps = [max((b - a for a, b in pairwise(each.chunk_s)), default=0.0) for each in seen]
    pauses = [gap for gap in gaps if gap > PAUSE_S]
    left = ("roseinfer:router_resumes_total", "roseinfer:router_placed_again_total")
    moved = sum(value for name in left for _, value in samples(metrics, name))
    return {
        "case": case,
        "streams": len(seen),
        "wrong": sum(each.failed for each in seen),
        "counted": int(sum(value for _, value in samples(metrics, "roseinfer:slo_requests_total"))),
        "moved": int(moved),
        "pause s (median)": percentile(pauses, 50) if pauses else 0.0,
        "pause s (most)": max(pauses, default=0.0),
        "first token s (most)": max((each.ttft_s for each in seen if each.chunk_s), default=0.0),
        "errors": sorted({f"{each.status} {each.error}" for each in seen if each.failed})[:5],
    }


def faults(found: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    wrong = {name: found[name] for name in ("wrong", "other text", "held") if found[name]}
    if found["counted"] != found["streams"]:
        wrong["counted"] = found["counted"]
    return [f"{found['case']}: {name} {value}" for name, value in wrong.items()]


def other_texts(seen: Sequence[Seen], wanted: Sequence[Seen]) -> int:
    """Streams that ended well in both runs, with different texts."""
    return sum(a.ok and b.ok and a.text != b.text for a, b in zip(seen, wanted, strict=True))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--workers", type=int, default=1, help="API processes")
    return parse_cases(parser, CASES, argv)


def main() -> int:
    args = parse()
    isolate("benchmarks.lost_hosts")
    print(header("hosts that are lost", vars(args), host()), flush=True)
    results = {case: one(case, args) for case in args.cases}
    base = results.get("none", next(iter(results.values())))[1]
    for found, seen in results.values():
        found["other text"] = other_texts(seen, base)
    rows = [{name: v for name, v in found.items() if name not in ("log", "errors")} for found, _ in results.values()]
    print(table(rows))
    wrong = [fault for found, _ in results.values() for fault in faults(found)]
    for found, _ in results.values():
        for text in [*found["errors"], *found["log"].splitlines()[-6:]]:
            print(f"  {found['case']}: {text[:300]}")
    print("\n".join(wrong) or "all as it should be")
    if args.json:
        write_json(args.json, {"cases": [found for found, _ in results.values()]}, vars(args), host())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
