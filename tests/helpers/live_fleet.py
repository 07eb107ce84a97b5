"""Engines with the embedded model in processes of their own, with their supervisor and the server's client."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roseinfer.cluster.routed import RoutedEngine, RouterSetup
from roseinfer.cluster.supervisor import EngineSupervisor
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import EngineState, GenerateRequest, SequenceChunk
from roseinfer.engine.live import InflightLimit, LiveRequests
from roseinfer.engine.process_transport import ProcessTransport
from roseinfer.text.output import Event
from roseinfer.text.tokenizer import Tokenizer

TIMEOUT_S, WORK_TIMEOUT_S = 120.0, 100.0
TEXTS = ("def fibonacci(", "class Stack:\n    def push(self, item):", "import os\n\n", "for i in range(10):")


@dataclass
class Stream:
    """A request and its output so far, by sample index."""

    request: GenerateRequest
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    error: RoseinferError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[Event] = field(default_factory=list)
    cached_tokens: int = 0

    def put(self, chunk: SequenceChunk) -> None:
        assert chunk.index not in self.ends, "no chunk after the last"
        self.texts[chunk.index] = self.texts.get(chunk.index, "") + chunk.text
        self.ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        assert len(self.ids[chunk.index]) == chunk.num_output_tokens
        self.events += chunk.events or []
        self.cached_tokens += chunk.cached_tokens
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
        """True if texts, tokens, ends and events are equal; ids of tool calls are random and not compared."""
        if (self.texts, self.ids, self.ends) != (other.texts, other.ids, other.ends):
            return False
        return _joined(self.events) == _joined(other.events)


def _joined(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Return (kind, text) of each run of events of one kind, so that chunk borders do not matter."""
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
    """Engine processes, their supervisor and their client."""

    def __init__(self, supervisor: EngineSupervisor, engine: RoutedEngine, tokenizer: Tokenizer, module: str) -> None:
        self._module = module.encode()
        self.supervisor = supervisor
        self.engine = engine
        self.tokenizer = tokenizer

    @property
    def pids(self) -> list[int]:
        """Process ids of the running engines, the oldest first."""
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
        """Return the streams once all have ended."""
        streams = self.start(requests)
        await ended(streams)
        return streams

    async def until_up(self) -> None:
        """Wait until the client reports all engines as ready."""
        async with asyncio.timeout(TIMEOUT_S):
            while any(report.state is not EngineState.READY for report in self.engine.reports()):
                await asyncio.sleep(0.01)

    async def until_empty(self) -> None:
        """Wait until no engine has a request or uses a block."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                stats = [report.stats for report in self.engine.reports()]
                if not any(each.running or each.waiting or each.blocks_used for each in stats):
                    return
                await asyncio.sleep(0.05)


async def ended(streams: Sequence[Stream]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        for stream in streams:
            await stream.ended.wait()


FleetWork = Callable[[LiveFleet], Coroutine[Any, Any, None]]


@asynccontextmanager
async def live_fleet(
    engines: int, make: type[ProcessTransport] = ProcessTransport, adapters: AdapterConfig | None = None
) -> AsyncIterator[LiveFleet]:
    """Start `engines` engines; `make` is the transport that starts a process."""
    config = EngineConfig(
        model=ModelConfig(model="tiny", device="cpu", threads=1),
        cache=CacheConfig(num_kv_blocks=512),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
        adapters=adapters or AdapterConfig(),
    )
    supervisor = EngineSupervisor(config, ReplicasConfig(replicas=engines), stall_s=60.0, make=make)
    tokenizer = load_tokenizer(config.model)
    await supervisor.launch()
    await supervisor.connect()
    try:
        requests = LiveRequests(tokenizer, None, InflightLimit(), "")
        engine = await RoutedEngine.start(supervisor.addresses, supervisor.rows_path, requests, RouterSetup())
        try:
            yield LiveFleet(supervisor, engine, tokenizer, make.module)
        finally:
            await engine.close()
    finally:
        await supervisor.close()


@contextmanager
def fleet_runner(**options: Any) -> Iterator[Callable[[FleetWork], None]]:
    """Run work with two engines, in the event loop that they belong to. `options`: of `live_fleet`."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        fleet = runner.run(stack.enter_async_context(live_fleet(2, **options)))

        async def bounded(work: FleetWork) -> None:
            async with asyncio.timeout(WORK_TIMEOUT_S):
                await fleet.until_up()
                await work(fleet)
                await fleet.until_empty()
                assert fleet.engine.num_live == 0

        yield lambda work: runner.run(bounded(work))
        runner.run(stack.aclose())


def kinds() -> Iterator[dict[str, Any]]:
    """Yield sampling parameters of several kinds, in turn, endlessly."""
    while True:
        yield {"temperature": 0.0}
        yield {"temperature": 0.8, "seed": 5}
        yield {"temperature": 1.0, "top_p": 0.9, "seed": 11, "n": 3}
        yield {"temperature": 0.7, "top_k": 20, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        yield {"temperature": 0.9, "seed": 8, "stop": ("\n\n", "return")}
        yield {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}
        yield {"temperature": 1.0}


def make_requests(tokenizer: Tokenizer, count: int, rng: random.Random, max_tokens: int) -> list[GenerateRequest]:
    fields = kinds()
    requests = []
    for number in range(count):
        given = next(fields)
        n = given.pop("n", 1)
        # Without a seed each run would draw another text.
        params = SequenceParams(**{"max_tokens": max_tokens, "ignore_eos": True, "seed": 1000 + number, **given})
        prompt = tokenizer.encode(f"# {rng.randrange(10**6)}\n{TEXTS[number % len(TEXTS)]}")
        requests.append(GenerateRequest(request_id=f"r{number}", prompt=Prompt(prompt, params), n=n))
    return requests
