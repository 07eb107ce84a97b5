"""What clients see of engines that are killed: nothing, but for a pause.

    python -m benchmarks.kill_engines [--rounds 50] [--engines 2] [--streams 32] [--seed 0]

Engines with the embedded model, each in a process of its own, with the owner that starts them again and the client that
the server uses. In each round `--streams` requests of all kinds run: greedy and seeded, one sample and several, with
stop strings, penalties, log probabilities; one engine, in turn, gets SIGKILL when a random share of their tokens is
there. Compared is every text with that of a run in which nothing happens. Afterwards nobody may hold a KV block.

Prints a line for each round: when the kill came (tokens of the round that were out), how many streams ended as they
should, with another text, or with an error; how long no stream said anything, and how long until all engines were up
again (both in seconds). Ends with code 1 if any stream was not as it should be.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from roseinfer.cluster.routed import RoutedEngine
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import EngineState, GenerateRequest, SequenceChunk
from roseinfer.engine.crew import EngineCrew
from roseinfer.engine.own_process import ProcessTransport
from roseinfer.engine.start import load_tokenizer
from roseinfer.text.output import Event
from roseinfer.text.tokenizer import Tokenizer

PATIENCE_S = 120.0
TEXTS = ("def fibonacci(", "class Stack:\n    def push(self, item):", "import os\n\n", "for i in range(10):")


@dataclass
class Stream:
    """A request, and what came of it."""

    request: GenerateRequest
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    error: RoseinferError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    heard_s: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def put(self, chunk: SequenceChunk) -> None:
        assert chunk.index not in self.ends, "nothing comes behind an end"
        self.heard_s.append(time.monotonic())
        self.texts[chunk.index] = self.texts.get(chunk.index, "") + chunk.text
        self.ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        assert len(self.ids[chunk.index]) == chunk.num_output_tokens
        self.events += chunk.events or []
        if chunk.finish_reason is not None:
            self.ends[chunk.index] = chunk.finish_reason
            if len(self.ends) == self.request.n:
                self.ended.set()

    def fail(self, error: RoseinferError) -> None:
        self.error = error
        self.ended.set()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids.values()))

    def same(self, other: "Stream") -> bool:
        """As far as it is not left to chance, as the ids of calls are."""
        if (self.texts, self.ids, self.ends) != (other.texts, other.ids, other.ends):
            return False
        return _said(self.events) == _said(other.events)


def _said(events: Sequence[Event]) -> list[tuple[str, str]]:
    """What events say of each kind, however it was cut into pieces."""
    found: list[tuple[str, str]] = []
    for event in events:
        kind = type(event).__name__
        text = getattr(event, "text", "") or getattr(event, "name", "")
        if found and found[-1][0] == kind and hasattr(event, "text"):
            found[-1] = kind, found[-1][1] + text
        else:
            found.append((kind, text))
    return found


class LiveFleet:
    """Engines in processes, their owner and their client."""

    def __init__(self, crew: EngineCrew, engine: RoutedEngine, tokenizer: Tokenizer, module: str) -> None:
        self._module = module.encode()
        self.crew = crew
        self.engine = engine
        self.tokenizer = tokenizer

    @property
    def pids(self) -> list[int]:
        """Of the engines that there are, the one that has run longest first."""
        found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        there = {int(pid): Path(f"/proc/{pid}") for pid in found}
        engines = [pid for pid, of in there.items() if self._module in (of / "cmdline").read_bytes()]
        return sorted(engines, key=lambda pid: int((there[pid] / "stat").read_text().rpartition(")")[2].split()[19]))

    def start(self, requests: Sequence[GenerateRequest]) -> list[Stream]:
        streams = [Stream(request) for request in requests]
        for stream in streams:
            self.engine.submit(stream.request, stream)
        return streams

    async def run(self, requests: Sequence[GenerateRequest]) -> list[Stream]:
        """Undisturbed."""
        streams = self.start(requests)
        await ended(streams)
        return streams

    async def until_up(self) -> None:
        """All engines take requests, and their client knows."""
        async with asyncio.timeout(PATIENCE_S):
            while any(report.state is not EngineState.READY for report in self.engine.reports()):
                await asyncio.sleep(0.01)

    async def until_empty(self) -> None:
        """No engine has a request or holds a block."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                stats = [report.stats for report in self.engine.reports()]
                if not any(each.running or each.waiting or each.blocks_used for each in stats):
                    return
                await asyncio.sleep(0.05)


async def ended(streams: Sequence[Stream]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for stream in streams:
            await stream.ended.wait()


@asynccontextmanager
async def live_fleet(engines: int, make: type[ProcessTransport] = ProcessTransport) -> AsyncIterator[LiveFleet]:
    """`make`: what an engine's process is."""
    config = EngineConfig(
        model=ModelConfig(model="tiny", device="cpu", threads=1),
        cache=CacheConfig(num_kv_blocks=512),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
    )
    crew = EngineCrew(config, ReplicasConfig(replicas=engines), stall_s=60.0, make=make)
    tokenizer = load_tokenizer(config.model)
    await crew.launch()
    await crew.connect()
    try:
        engine = await RoutedEngine.start(crew.addresses, crew.board_path, tokenizer)
        try:
            yield LiveFleet(crew, engine, tokenizer, make.module)
        finally:
            await engine.close()
    finally:
        await crew.close()


def kinds() -> Iterator[dict[str, Any]]:
    """Ways to sample, again and again."""
    while True:
        yield {"temperature": 0.0}
        yield {"temperature": 0.8, "seed": 5}
        yield {"temperature": 1.0, "top_p": 0.9, "seed": 11, "n": 3}
        yield {"temperature": 0.7, "top_k": 20, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        yield {"temperature": 0.9, "seed": 8, "stop": ("\n\n", "return")}
        yield {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}
        yield {"temperature": 1.0}


def make_requests(tokenizer: Tokenizer, count: int, rng: random.Random, max_tokens: int) -> list[GenerateRequest]:
    ways = kinds()
    requests = []
    for number in range(count):
        way = next(ways)
        n = way.pop("n", 1)
        # One that brings no seed would get another one each time.
        params = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "seed": 1000 + number, **way})
        prompt = tokenizer.encode(f"# {rng.randrange(10**6)}\n{TEXTS[number % len(TEXTS)]}")
        requests.append(GenerateRequest(request_id=f"r{number}", prompt_ids=prompt, params=params, n=n))
    return requests


@dataclass
class Round:
    killed_at: int
    right: int
    different: int
    failed: int
    pause_s: float
    back_s: float


async def kill_round(fleet: LiveFleet, number: int, expected: Sequence[Stream], rng: random.Random) -> Round:
    requests = [replace(each.request, request_id=f"k{number}-{each.request.request_id}") for each in expected]
    total = sum(each.tokens for each in expected)
    at = rng.randrange(total * 9 // 10)
    streams = fleet.start(requests)
    async with asyncio.timeout(PATIENCE_S):
        while sum(stream.tokens for stream in streams) < at:
            await asyncio.sleep(0.001)
    os.kill(fleet.pids[0], signal.SIGKILL)
    killed_s = time.monotonic()
    killed_at = sum(stream.tokens for stream in streams)
    await ended(streams)
    # Its end is noticed before the next process can have taken its place.
    await fleet.until_up()
    back_s = time.monotonic() - killed_s
    await fleet.until_empty()
    assert fleet.engine.num_live == 0
    heard = sorted([killed_s, *(at_s for stream in streams for at_s in stream.heard_s if at_s > killed_s)])
    pause_s = max((later - earlier for earlier, later in pairwise(heard)), default=0.0)
    failed = sum(stream.error is not None for stream in streams)
    right = sum(stream.error is None and stream.same(wanted) for stream, wanted in zip(streams, expected, strict=True))
    return Round(killed_at, right, len(streams) - right - failed, failed, pause_s, back_s)


async def measure(rounds: int, engines: int, count: int, seed: int, max_tokens: int) -> list[Round]:
    rng = random.Random(seed)
    done: list[Round] = []
    requests: list[GenerateRequest] = []
    print("round  kill at   tokens  right  different  failed  pause s  back s", flush=True)
    while len(done) < rounds:
        async with live_fleet(engines) as fleet:
            requests = requests or make_requests(fleet.tokenizer, count, rng, max_tokens)
            expected = await fleet.run(requests)
            total = sum(stream.tokens for stream in expected)
            # One that dies time and again is left alone for longer and longer.
            for number in range(len(done), min(rounds, len(done) + 2 * engines)):
                one = await kill_round(fleet, number, expected, rng)
                done.append(one)
                print(
                    f"{number:5d}  {one.killed_at:7d}  {total:7d}  {one.right:5d}  {one.different:9d}  {one.failed:6d}"
                    f"  {one.pause_s:7.2f}  {one.back_s:6.2f}",
                    flush=True,
                )
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill engines under streams.")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60, help="of each sample")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    done = asyncio.run(measure(given.rounds, given.engines, given.streams, given.seed, given.tokens))
    pauses, backs = sorted(one.pause_s for one in done), sorted(one.back_s for one in done)
    middle = len(done) // 2
    print(
        f"total: {sum(one.right for one in done)} right, {sum(one.different for one in done)} different, "
        f"{sum(one.failed for one in done)} failed; pause median {pauses[middle]:.2f} s, most {pauses[-1]:.2f} s; "
        f"all engines back: median {backs[middle]:.2f} s, most {backs[-1]:.2f} s"
    )
    return int(any(one.right < given.streams for one in done))


if __name__ == "__main__":
    sys.exit(main())
