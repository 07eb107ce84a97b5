"""What the way through a router costs: time to the first token, and CPU time of the API process, over real HTTP.

    python -m benchmarks.routed_overhead [--peer FOLDER] [--rounds 400] [--streams 64] [--tokens 400] [--passes 5]

Servers with priced engines of short steps, one API process each: this checkout with one engine and with two, and, with
--peer, another checkout of roseinfer with one engine. Requests take turns between the servers, so what else the machine
does falls on all of them. First one at a time, each of one token: TTFT as the client sees it, less the step. Then
--streams for each engine at once: CPU time of the API process (user and system, of all its threads, from /proc) for
each token and each request. For each engine, because what a message from an engine costs is shared by its streams: the
same streams spread over two engines come in twice as many messages. Prompts have 512 tokens of their own, and
objectives as any client would give. Needs the bench extra.
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.faults.server import ServerUnderTest
from benchmarks.fleet_load import Planned, put
from roseinfer.bench.report import header, host, percentile, table, write_json
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams

STEP_S = 2e-3
COST = CostParams(step_s=STEP_S, token_s=1e-7, pair_s=0.0, row_s=1e-6, context_s=0.0)
DECODE_STEP_S = 10e-3  # with many streams: the API process is to keep up
PROMPT = 512
WARM_UP = 20


def flags(cost: Path, replicas: int) -> list[str]:
    options = ["--device", "priced", "--cost", str(cost), "--max-model-len", "8192", "--num-kv-blocks", "65536"]
    options += ["--api-workers", "1", "--log-level", "warning"]
    return [*options, "--replicas", str(replicas)] if replicas > 1 else options


def request(number: int, tokens: int) -> Planned:
    """Of a prompt that nobody has sent before. Its objectives are out of nobody's reach."""
    body: dict[str, Any] = {"prompt": [number % 4000 + 10, number // 4000 + 10] * (PROMPT // 2), "max_tokens": tokens}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "seed": number}
    return Planned(0.0, json.dumps(body | {"slo": {"ttft_ms": 60e3, "tpot_ms": 1e3}}).encode())


def cpu_s(pid: int) -> float:
    """Of all threads of a process that are alive."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


async def ttft_ms(servers: dict[str, ServerUnderTest], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + WARM_UP):
        for name, server in servers.items():
            (seen,) = await put(server.url, [request(number, 1)], delay_s=0.0)
            if not seen.ok:
                raise RuntimeError(f"{name}: {seen.error}")
            if number >= WARM_UP:
                found[name].append(1e3 * (seen.chunk_s[0] - STEP_S))
    return found


async def streams_us(server: ServerUnderTest, streams: int, tokens: int, first: int) -> float:
    """Microseconds of the API process for each token of one pass."""
    before = cpu_s(server.process.pid)
    seen = await put(server.url, [request(first + number, tokens) for number in range(streams)])
    if not all(each.ok and each.output_tokens == tokens for each in seen):
        raise RuntimeError(next(each.error or "a stream was cut short" for each in seen if not each.ok))
    return 1e6 * (cpu_s(server.process.pid) - before) / (streams * tokens)


def measure(args: argparse.Namespace, kinds: dict[str, tuple[int, dict[str, str]]]) -> dict[str, dict[str, float]]:
    """Name of a server -> what it costs. `kinds`: name -> (engines, variables of its environment)."""
    found: dict[str, dict[str, float]] = {name: {} for name in kinds}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder, contextlib.ExitStack() as stack:
        fast, slow = Path(folder) / "fast.json", Path(folder) / "slow.json"
        fast.write_text(json.dumps(cost_as_json(COST)))
        slow.write_text(json.dumps(cost_as_json(COST.slower(DECODE_STEP_S / STEP_S))))
        with contextlib.ExitStack() as own:
            servers = {
                name: own.enter_context(ServerUnderTest(*flags(fast, count), environment=env))
                for name, (count, env) in kinds.items()
            }
            for name, times in asyncio.run(ttft_ms(servers, args.rounds)).items():
                found[name] |= {f"TTFT p{p} ms": round(percentile(times, p), 3) for p in (10, 50, 90)}
        servers = {
            name: stack.enter_context(ServerUnderTest(*flags(slow, count), environment=env))
            for name, (count, env) in kinds.items()
        }
        passes: dict[str, list[float]] = {name: [] for name in kinds}
        single: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(args.passes + 1):
            for name, server in servers.items():
                first = 1_000_000 + 10_000 * number
                streams = args.streams * kinds[name][0]
                many = asyncio.run(streams_us(server, streams, args.tokens, first))
                few = asyncio.run(streams_us(server, streams, 1, first + 5000))
                if number:  # the first pass warms up
                    passes[name].append(many)
                    single[name].append(few)
        for name in kinds:
            found[name]["us a token"] = round(median(passes[name]), 2)
            found[name]["least us a token"] = round(min(passes[name]), 2)
            found[name]["us a request"] = round(median(single[name]), 1)
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="folder of another checkout")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--streams", type=int, default=64, help="of each engine")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--replicas", default="1,2", help="engines of the servers of this checkout")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    print(header("the way through a router", vars(args), host()), flush=True)
    kinds: dict[str, tuple[int, dict[str, str]]] = {}
    if args.peer:
        path = [os.path.abspath(args.peer), *filter(None, [os.environ.get("PYTHONPATH")])]
        kinds["peer"] = (1, {"PYTHONPATH": os.pathsep.join(path)})
    for count in map(int, args.replicas.split(",")):
        kinds[f"{count} engine{'s' * (count > 1)}"] = (count, {})
    found = measure(args, kinds)
    print(table([{"server": name, **{what: str(value) for what, value in own.items()}} for name, own in found.items()]))
    if args.json:
        write_json(args.json, found, vars(args), host())


if __name__ == "__main__":
    main()
