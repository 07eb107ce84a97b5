"""A burst over several API processes and engines: does it spread, although all processes see the same promises?

    python -m benchmarks.routed_burst [--requests 500] [--replicas 4] [--workers 4] [--router pace] [--rounds 3]

Connections are opened beforehand, and all requests written at once, on as many connections; `sent ms` says how long
that took. Prompts differ, of 32 to 512 tokens, with objectives that an idle fleet keeps. `most` is the largest share of
an engine times the number of engines: 1 = even, and 1.3 is what is allowed. By the server's own count of placements.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.server import ServerUnderTest, until
from benchmarks.fleet_load import machine_options, samples, write_cost
from roseinfer.bench.report import header, host, table
from roseinfer.sim.setups import SCORPIO_8B

OUTPUT = 4
PATIENCE_S = 120.0


def requests(count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randint(32, 512))]
        body = {"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "slo": {"ttft_ms": 30e3, "tpot_ms": 200}}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        made.append(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return made


async def burst(port: int, messages: Sequence[bytes], settle_s: float = 1.0) -> tuple[float, Counter[str]]:
    """(seconds that sending took, answers by their status line). `settle_s`: for workers to be handed connections."""
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in messages]
    await asyncio.sleep(settle_s)
    began_s = time.monotonic()
    for (_, writer), message in zip(connections, messages, strict=True):
        writer.write(message)
    sent_s = time.monotonic() - began_s

    async def status(reader: asyncio.StreamReader) -> str:
        return (await reader.read()).split(b"\r\n", 1)[0].decode()

    async with asyncio.timeout(PATIENCE_S):
        found = Counter(await asyncio.gather(*(status(reader) for reader, _ in connections)))
    for _, writer in connections:
        writer.close()
    return sent_s, found


def placed(server: ServerUnderTest) -> Counter[str]:
    """Placements so far, by engine."""
    found: Counter[str] = Counter()
    for labels, value in samples(server.get("/metrics")[1], "roseinfer:router_placements_total"):
        found[labels["engine"]] += int(value)
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="burst-") as folder:
        flags = machine_options(SCORPIO_8B, write_cost(SCORPIO_8B, Path(folder) / "cost.json"), 400.0)
        flags += ["--replicas", str(args.replicas), "--router", args.router, "--api-workers", str(args.workers)]
        with ServerUnderTest(*flags, "--log-level", "warning") as server:
            for number in range(args.rounds):
                before = placed(server)
                sent_s, answers = asyncio.run(burst(server.port, requests(args.requests, number)))
                until(server.idle)
                own = placed(server) - before
                most = max(own.values(), default=0) * args.replicas / max(1, own.total())
                rows.append(
                    {
                        "round": number,
                        "sent ms": 1e3 * sent_s,
                        "placed": " ".join(str(own[engine]) for engine in sorted(own)),
                        "most": f"{most:.2f}",
                        "answers": ", ".join(f"{count} x {line}" for line, count in answers.items()),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--router", default="pace")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(header("a burst over a fleet", vars(args), host()), flush=True)
    print(table(measure(args)))


if __name__ == "__main__":
    main()
