"""What an open console costs a server on a CPU: throughput, and CPU time of its two processes for each token.

    python -m benchmarks.console_cost [--peer FOLDER] [--consoles 1] [--streams 32] [--tokens 300] [--passes 12]

The embedded model, one API process. Passes of --streams at once take turns: with --consoles readers of the feed, which
take all that it sends and do nothing with it, and with none; with --peer also without any at another checkout of
roseinfer. Tokens a second are those of a whole pass; CPU time (user and system, of all threads) is from /proc (Linux).
Each figure is the median of all passes. Ratios are those of a pass to the one without a console beside it, which had
the same machine, with quartiles: others may use the machine too. CPU time tells more then than throughput does. Needs
the bench extra.
"""

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks.faults.server import ServerUnderTest
from benchmarks.fleet_load import Planned, put
from benchmarks.routed_overhead import cpu_s
from roseinfer.bench.report import header, host, table, write_json

CLOSED, OPEN, PEER = "none", "open", "none, peer"
WARM_UP = 1


class Pass(NamedTuple):
    tokens_per_s: float
    api_us: float
    engine_us: float
    fed_bytes_per_s: float

    @property
    def cpu_us(self) -> float:
        return self.api_us + self.engine_us


class Readers:
    """So many that read a server's feed."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextlib.asynccontextmanager
    async def looking(self, server: ServerUnderTest, count: int) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._read(server.port)) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET /console/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            while data := await reader.read(2**20):
                self.bytes += len(data)
        finally:
            writer.close()


def request(number: int, tokens: int) -> Planned:
    """With objectives that are out of nobody's reach, so that the policy has all of its figures to show."""
    body: dict[str, Any] = {"prompt": [number % 300 + 10] * 16, "max_tokens": tokens, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "seed": number}
    return Planned(0.0, json.dumps(body | {"slo": {"ttft_ms": 60e3, "tpot_ms": 1e3}}).encode())


async def run_pass(server: ServerUnderTest, consoles: int, args: argparse.Namespace) -> Pass:
    readers, api, engine = Readers(), server.process.pid, server.engine()
    async with readers.looking(server, consoles):
        before, began_s = (cpu_s(api), cpu_s(engine)), time.perf_counter()
        seen = await put(server.url, [request(number, args.tokens) for number in range(args.streams)])
        took_s = time.perf_counter() - began_s
        api_s, engine_s = cpu_s(api) - before[0], cpu_s(engine) - before[1]
    if not all(each.ok and each.output_tokens == args.tokens for each in seen):
        raise RuntimeError(next(each.error or "a stream was cut short" for each in seen if not each.ok))
    tokens = args.streams * args.tokens
    return Pass(tokens / took_s, 1e6 * api_s / tokens, 1e6 * engine_s / tokens, readers.bytes / took_s)


def measure(args: argparse.Namespace) -> dict[str, list[Pass]]:
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(ServerUnderTest("--api-workers", "1", "--log-level", "warning"))
        arms = {CLOSED: (own, 0), OPEN: (own, args.consoles)}
        if args.peer:
            # Not the checkout that this is run in, which python would put before PYTHONPATH.
            environment = {"PYTHONPATH": os.path.abspath(args.peer), "PYTHONSAFEPATH": "1"}
            options = ("--api-workers", "1", "--log-level", "warning")
            arms[PEER] = (stack.enter_context(ServerUnderTest(*options, environment=environment)), 0)
        found: dict[str, list[Pass]] = {name: [] for name in arms}
        for number in range(args.passes + WARM_UP):
            names = list(arms) if number % 2 else list(reversed(arms))
            for name in names:
                one = asyncio.run(run_pass(*arms[name], args))
                if number >= WARM_UP:
                    found[name].append(one)
        return found


def rows(found: dict[str, list[Pass]]) -> list[dict[str, str]]:
    shown = []
    for name, passes in found.items():
        beside = list(zip(passes, found[CLOSED], strict=True))
        shown.append(
            {
                "consoles": name,
                "tokens/s": f"{median(one.tokens_per_s for one in passes):.0f}",
                "ratio": _quartiles([one.tokens_per_s / other.tokens_per_s for one, other in beside]),
                "API us a token": f"{median(one.api_us for one in passes):.2f}",
                "engine us a token": f"{median(one.engine_us for one in passes):.2f}",
                "ratio of CPU": _quartiles([one.cpu_us / other.cpu_us for one, other in beside]),
                "feed KB/s": f"{median(one.fed_bytes_per_s for one in passes) / 1e3:.1f}",
            }
        )
    return shown


def _quartiles(ratios: list[float]) -> str:
    low, middle, high = quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="folder of another checkout")
    parser.add_argument("--consoles", type=int, default=1)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--json")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    print(header("what an open console costs", vars(args), host()), flush=True)
    found = measure(args)
    print(table(rows(found)))
    if args.json:
        write_json(args.json, {name: [one._asdict() for one in passes] for name, passes in found.items()}, vars(args))


if __name__ == "__main__":
    main()
