"""What a token costs over TCP: the same engines reached by their sockets on this host, and by their keepers' ports.

    python -m benchmarks.remote_cost [--rounds 200] [--streams 32] [--tokens 200] [--passes 5] [--step 0.01]

Two priced engines each way, which take turns, so that what else the machine does falls on both. First requests of one
token, one at a time: the time until it is there, less the step. Then --streams for each engine at once: CPU time of the
process that asks (user and system, of all its threads) and of the engines' processes, for each token. There is no HTTP:
this is the way between the server's process and the engine. TCP is that of the loopback interface, so a network's own
time comes on top.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.routed_overhead import cpu_s
from roseinfer.bench.report import header, host, percentile, table, write_json
from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.cluster.routed import RoutedEngine
from roseinfer.cluster.start import routed_engine
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, PricedConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.crew import EngineCrew
from roseinfer.engine.live import InflightLimit
from roseinfer.engine.start import load_tokenizer
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams

ENGINES = 2
SHORT_S = 2e-3
PROMPT = 64
WARM_UP = 20
SECRET = "remote cost, on loopback alone"
MODULE = "roseinfer.engine.process"


@dataclass
class Connector:
    """`processes`: those of the engines."""

    engine: RoutedEngine
    processes: list[int]
    found: dict[str, list[float]] = field(default_factory=dict)

    def note(self, what: str, value: float) -> None:
        self.found.setdefault(what, []).append(value)

    def engines_s(self) -> float:
        return sum(map(cpu_s, self.processes))


def engine_config(cost: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(device="priced"),
        cache=CacheConfig(num_kv_blocks=16384),
        priced=PricedConfig(cost=str(cost)),
    )


def children(process: int) -> list[int]:
    """The engines that a process has."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found if MODULE.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextlib.asynccontextmanager
async def by_sockets(config: EngineConfig) -> AsyncIterator[Connector]:
    replicas = ReplicasConfig(replicas=ENGINES)
    crew = EngineCrew(config, replicas, stall_s=60.0)
    try:
        await crew.launch()
        await crew.connect()
        engine = await routed_engine(crew.places, load_tokenizer(config.model), replicas, InflightLimit(None))
        try:
            mine = Path("/proc/self").resolve().name
            yield Connector(engine, children(int(mine)))
        finally:
            await engine.close()
    finally:
        await crew.close()


@contextlib.contextmanager
def keeper(cost: Path, secret: Path) -> Iterator[tuple[int, str]]:
    """Its process, and where it listens."""
    flags = ["--bind", "127.0.0.1:0", "--secret-file", str(secret), "--device", "priced", "--cost", str(cost)]
    command = [sys.executable, "-m", "roseinfer.cli", "engine", *flags, "--num-kv-blocks", "16384"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def by_ports(config: EngineConfig, cost: Path, folder: Path) -> AsyncIterator[Connector]:
    secret = folder / f"{cost.stem}.secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(keeper(cost, secret)) for _ in range(ENGINES)]
        places = EngineAddresses([address for _, address in kept], None, SECRET.encode())
        engine = await routed_engine(places, load_tokenizer(config.model), ReplicasConfig(), InflightLimit(None))
        try:
            yield Connector(engine, [child for process, _ in kept for child in children(process)])
        finally:
            await engine.close()


async def ask(way: Connector, number: int, tokens: int) -> None:
    """A prompt that nobody has sent before."""
    prompt = [number % 1000 + 10, number // 1000 + 10] * (PROMPT // 2)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number)
    async for _ in way.engine.generate(GenerateRequest(request_id=str(number), prompt_ids=prompt, params=params)):
        pass


async def one_by_one(ways: dict[str, Connector], rounds: int) -> None:
    for number in range(rounds + WARM_UP):
        for way in ways.values():
            began_s = time.perf_counter()
            await ask(way, number, 1)
            if number >= WARM_UP:
                way.note("one token ms", 1e3 * (time.perf_counter() - began_s - SHORT_S))


async def at_once(ways: dict[str, Connector], streams: int, tokens: int, passes: int) -> None:
    for turn in range(passes + 1):
        for way in ways.values():
            ours_s, engines_s = time.process_time(), way.engines_s()
            requests = [ask(way, 10_000 * (turn + 1) + number, tokens) for number in range(ENGINES * streams)]
            await asyncio.gather(*requests)
            each_us = 1e6 / (ENGINES * streams * tokens)
            if turn:  # the first pass warms up
                way.note("asking us a token", each_us * (time.process_time() - ours_s))
                way.note("engine us a token", each_us * (way.engines_s() - engines_s))


async def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {"sockets": {}, "ports": {}}
    with tempfile.TemporaryDirectory(prefix="remote-") as name:
        folder = Path(name)
        for step_s in (SHORT_S, args.step):
            cost = folder / f"{step_s}.json"
            params = CostParams(step_s=step_s, token_s=1e-7, pair_s=0.0, row_s=1e-6, context_s=0.0)
            cost.write_text(json.dumps(cost_as_json(params)))
            config = engine_config(cost)
            async with by_sockets(config) as sockets, by_ports(config, cost, folder) as ports:
                ways = {"sockets": sockets, "ports": ports}
                if step_s == SHORT_S:
                    await one_by_one(ways, args.rounds)
                else:
                    await at_once(ways, args.streams, args.tokens, args.passes)
                for kind, way in ways.items():
                    found[kind] |= summary(way.found)
    return found


def summary(found: dict[str, list[float]]) -> dict[str, float]:
    rows: dict[str, float] = {}
    for what, values in found.items():
        if what.endswith("ms"):
            rows |= {f"{what} p{p}": round(percentile(values, p), 3) for p in (10, 50, 90)}
        else:
            rows |= {what: round(median(values), 2), f"least {what}": round(min(values), 2)}
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--streams", type=int, default=32, help="of each engine")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--step", type=float, default=10e-3, help="seconds a step takes with many streams")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    print(header("the way to an engine", vars(args), host()), flush=True)
    found = asyncio.run(measure(args))
    print(table([{"way": kind, **{what: str(value) for what, value in own.items()}} for kind, own in found.items()]))
    if args.json:
        write_json(args.json, found, vars(args), host())


if __name__ == "__main__":
    main()
