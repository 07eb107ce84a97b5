"""CPU cost of an API process: a streamed request, and each of its tokens. No engine, no sockets.

    python -m benchmarks.api_cost [--rounds 24] [--requests 128] [--ids 1 65 1025] [--streams 1 64 256]
                                  [--words 20 1000] [--traces] [--log]

The application, uvicorn's connection class and the engine client are the real ones; connections are given bytes and
take bytes, the engine's messages are encoded and decoded. Figures are microseconds of one thread's CPU, the smallest
of all rounds and, in brackets, the median. What the kernel adds is about 50 us a connection and 4 us a write. Each
request logs a line to standard error: send that to a file. With `--traces` each request also leaves its spans; the
thread that encodes and sends them is not in these figures, and what takes them here drops them.

With `--log`, the only rows are those of requests of 65 prompt ids with the log level info and error, in turn, and their
difference: what the log line of a request takes, as text and as JSON.

The rows of responses are those of POST /v1/responses, not stored and stored, in turn: CPU of the event loop's thread,
then of all threads of the process.
"""

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import uvicorn

from roseinfer.bench.report import header
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.outputs import End, FinishReason, FirstToken, RequestTimes, SchedulerStats, SequenceOutput
from roseinfer.core.plan import StepLimits
from roseinfer.core.request import sequence_id
from roseinfer.core.runner import RunnerFacts
from roseinfer.core.traits import PolicyTraits
from roseinfer.engine.api import EngineInfo, StepRecord
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.messages import Add, ClientMessage, EngineMessage, Outputs
from roseinfer.server.app import ModelParts, build_app, parts_of
from roseinfer.server.hosting import configure_logging, new_event_loop, settle_garbage_collector
from roseinfer.server.http.connection import limited_protocol
from roseinfer.server.http.limits import Limits
from roseinfer.server.observe.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

CONTEXT, VOCAB, TOKEN = 4096, 4096, 150
LOGGED_IDS = 65  # in the prompts of requests whose log lines are measured
INFO = EngineInfo(
    model="none",
    facts=RunnerFacts(
        model_type="none",
        max_model_len=CONTEXT,
        num_blocks=1000,
        block_size=16,
        limits=StepLimits(256, CONTEXT),
        vocab_size=VOCAB,
        eos_token_ids=(0,),
        dtype="none",
        weights="none",
        device="none",
        default_sampling={},
        startup_s={},
    ),
    max_num_seqs=256,
    kv_cache="float32",
    policy=PolicyTraits("slack", sheds=True, priorities=True),
)
HEAD = (
    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
    b"User-Agent: benchmark\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


class Wireless(asyncio.Transport):
    """Transport without a peer."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("sockname", "peername") else default

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Bench:
    """API process of a server, and an engine that sends what it is told to."""

    def __init__(self, folder: Path, traces: bool = False) -> None:
        self.added: list[str] = []
        self._folder = folder
        self._traces = traces
        self._encode = msgspec.msgpack.Encoder().encode
        self._read = msgspec.msgpack.Decoder(ClientMessage).decode
        self._decode = msgspec.msgpack.Decoder(EngineMessage).decode
        self._on_message: Callable[[EngineMessage], None]
        self._config: uvicorn.Config
        self._server: uvicorn.Server
        self.engine: AsyncEngine

    async def open(self) -> None:
        tokenizer = load_tokenizer(ModelConfig())
        self.engine = await AsyncEngine.start(self, tokenizer)
        server = ServerConfig(max_num_queued_reqs=10**6)
        configure_logging(server)
        protocol = limited_protocol(Limits.of(server))
        tracing = dropped_traces() if self._traces else None
        parts = parts_of([ModelParts(server, "none")], response_file=self._folder / "responses.db", tracing=tracing)
        parts.service.attach(self.engine, tokenizer)
        app = build_app(parts)
        self._store = app.state.responses.store
        self._config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False)
        self._config.load()
        self._server = uvicorn.Server(self._config)
        settle_garbage_collector()

    async def written(self) -> None:
        """Return when all responses so far are stored."""
        await self._store.written()

    def close_store(self) -> None:
        self._store.close()

    # Transport of the engine client:
    async def start(self, on_message: Callable[[EngineMessage], None], on_death: object) -> EngineInfo:
        self._on_message = on_message
        return INFO

    def send(self, message: ClientMessage) -> None:
        read = self._read(self._encode(message))
        if isinstance(read, Add):
            self.added.append(sequence_id(read.request_id, 0))

    async def close(self) -> None:
        pass

    def connect(self) -> Any:
        protocol: Any = self._config.http_protocol_class
        made = protocol(config=self._config, server_state=self._server.server_state, app_state={})
        made.connection_made(Wireless())
        return made

    def outputs(self, sequences: list[str], first: bool = False, last: bool = False) -> bytes:
        """Return a step's message with one token for each request."""
        started = FirstToken(0, 1.0, 2.0, 3.0) if first else None
        end = End(FinishReason.LENGTH, RequestTimes(1.0, 2.0, 3.0, 4.0)) if last else None
        outputs = [SequenceOutput(sequence, (TOKEN,), None, None, started, end) for sequence in sequences]
        return self._encode(Outputs(outputs, SchedulerStats(), time.monotonic(), [StepRecord(len(outputs), 0.001)]))

    async def hear(self, message: bytes) -> None:
        self._on_message(self._decode(message))
        await settle()


def dropped_traces() -> Tracing:
    """Return traces whose spans are dropped instead of sent."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from roseinfer.integrations.otel.traces import Traces

    class Nobody(SpanExporter):
        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            return SpanExportResult.SUCCESS

    return Traces(Nobody())


async def settle() -> None:
    """Let woken tasks run."""
    for _ in range(3):
        await asyncio.sleep(0)


def request(ids: int, tokens: int) -> bytes:
    body = {"model": "none", "prompt": list(range(ids)), "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    data = orjson.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    return HEAD % (b"/v1/completions", len(data)) + data


async def request_us(bench: Bench, count: int, ids: int) -> float:
    """Measure one request from its connection to its end; an eighth of the requests receive output at a time."""
    data = request(ids, 1)
    bench.added.clear()
    began = time.thread_time()
    connections = [bench.connect() for _ in range(count)]
    for connection in connections:
        connection.data_received(data)
    await settle()
    part = max(1, count // 8)
    for start in range(0, count, part):
        await bench.hear(bench.outputs(bench.added[start : start + part], first=True, last=True))
    for connection in connections:
        connection.connection_lost(None)
    spent = time.thread_time() - began
    assert bench.engine.num_live == 0
    return spent / count * 1e6


async def token_us(bench: Bench, streams: int) -> float:
    """Measure one token of one of many streams that all get a token in each step."""
    steps = max(20, 1500 // streams)
    bench.added.clear()
    connections = [bench.connect() for _ in range(streams)]
    for connection in connections:
        connection.data_received(request(4, steps + 2))
    await settle()
    await bench.hear(bench.outputs(bench.added, first=True))
    messages = [bench.outputs(bench.added) for _ in range(steps)]
    began = time.thread_time()
    for message in messages:
        await bench.hear(message)
    spent = time.thread_time() - began
    await bench.hear(bench.outputs(bench.added, last=True))
    for connection in connections:
        connection.connection_lost(None)
    return spent / (streams * steps) * 1e6


async def response_us(bench: Bench, count: int, words: int, store: bool) -> tuple[float, float]:
    """Measure one response: CPU of its event loop and of all threads, when all are written."""
    body = {"input": "word " * words, "max_output_tokens": 1, "store": store, "ignore_eos": True}
    data = orjson.dumps(body)
    bench.added.clear()
    began, began_all = time.thread_time(), time.process_time()
    connections = [bench.connect() for _ in range(count)]
    for connection in connections:
        connection.data_received(HEAD % (b"/v1/responses", len(data)) + data)
    while len(bench.added) < count:  # prompts are tokenised in threads
        await asyncio.sleep(0.001)
    await bench.hear(bench.outputs(bench.added, first=True, last=True))
    await settle()
    for connection in connections:
        connection.connection_lost(None)
    spent = time.thread_time() - began
    await bench.written()
    spent_all = time.process_time() - began_all
    assert bench.engine.num_live == 0
    return spent / count * 1e6, spent_all / count * 1e6


async def show_responses(bench: Bench, args: argparse.Namespace, words: int) -> None:
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(args.rounds):
        for store, found in taken.items():
            found.append(await response_us(bench, args.requests, words, store))
    for store, found in taken.items():
        name = f"a response to {words} words, {'stored' if store else 'not stored'}"
        for where, values in zip(("loop", "all"), zip(*found, strict=True), strict=True):
            print(f"{name:<44} {where:<4} {min(values):8.2f} us  ({statistics.median(values):.2f})", flush=True)


async def show(name: str, rounds: int, measure: Callable[[], Awaitable[float]]) -> None:
    taken = [await measure() for _ in range(rounds)]
    show_row(name, min(taken), statistics.median(taken))


async def show_log(bench: Bench, args: argparse.Namespace, log_format: str) -> None:
    logging.getLogger().handlers.clear()
    configure_logging(ServerConfig(log_format=log_format))
    taken: dict[str, list[float]] = {"info": [], "error": []}
    for _ in range(args.rounds):
        for level, found in taken.items():
            logging.getLogger("roseinfer").setLevel(level.upper())
            found.append(await request_us(bench, args.requests, LOGGED_IDS))
    for level, found in taken.items():
        show_row(f"a request, log level {level}, {log_format}", min(found), statistics.median(found))
    pairs = [logged - silent for logged, silent in zip(*taken.values(), strict=True)]
    show_row(f"its log line, {log_format}", min(taken["info"]) - min(taken["error"]), statistics.median(pairs))


def show_row(name: str, least_us: float, median_us: float) -> None:
    print(f"{name:<36} {least_us:8.2f} us  ({median_us:.2f})", flush=True)


async def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.traces)
        await bench.open()
        await measure(bench, args)
        await asyncio.to_thread(bench.close_store)


async def measure(bench: Bench, args: argparse.Namespace) -> None:
    if args.log:
        for log_format in ("text", "json"):
            await show_log(bench, args, log_format)
        return
    for ids in args.ids:
        await show(f"a request of {ids} prompt ids", args.rounds, partial(request_us, bench, args.requests, ids))
    for streams in args.streams:
        await show(f"a token, {streams} streams", args.rounds, partial(token_us, bench, streams))
    for words in args.words:
        await show_responses(bench, args, words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--ids", type=int, nargs="+", default=[1, 65, 1025])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--words", type=int, nargs="+", default=[20, 1000], help="of the input of responses")
    parser.add_argument("--traces", action="store_true", help="with traces of all requests")
    parser.add_argument("--log", action="store_true", help="measure the log lines of requests only")
    args = parser.parse_args()
    print(header("API process", vars(args)))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(args))


if __name__ == "__main__":
    main()
