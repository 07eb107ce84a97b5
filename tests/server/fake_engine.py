"""An engine for the server's tests: no model, replies by script, and a record of what was asked of it.

A step of a script that can be called is called.
"""

import asyncio
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import EngineClosedError, EngineDeadError, InvalidRequestError, RoseinferError
from roseinfer.core.outputs import End, FinishReason, FirstToken, RequestTimes, SchedulerStats, SequenceOutput
from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.slo import Cause, Rejection
from roseinfer.engine.adapter_names import AdapterNames, check_adapter_name
from roseinfer.engine.api import (
    EngineHealth,
    EngineInfo,
    EngineReport,
    EngineState,
    GenerateRequest,
    Route,
    RoutingObserver,
    SequenceChunk,
    Sink,
    StepRecord,
)
from roseinfer.engine.output import ParsedSequenceText
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.engine_info import engine_info

INFO = engine_info(
    model_type="llama",
    max_model_len=64,
    vocab_size=400,
    block_size=16,
    num_blocks=100,
    weights="fp8 by block",
    kv_cache="fp8",
    eos_token_ids=(1,),
    startup_s={"load": 0.5},
    block_bytes=1000,
)
# Numbers of the vectors of prompt-only requests.
WIDTH = 8
TIMES = RequestTimes(arrival_s=10.0, scheduled_s=10.25, first_token_s=10.5, finished_s=12.5)


@dataclass(frozen=True)
class Wait:
    """Holds a script until `FakeEngine.release()`."""


Step = SequenceChunk | RoseinferError | Exception | Wait | Callable[[], None]
Script = Callable[[GenerateRequest], list[Step]]


class FakeEngine:
    """`script` makes the steps of each request; the default one replies with `reply`, token by token.

    `folders`: adapters that can be loaded, by path; their names do not matter.
    """

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo = INFO, number: int = 0) -> None:
        self.info = info
        self.number = number
        self.tokenizer = tokenizer
        self.snapshot = SchedulerStats()
        self.closed = False
        self._listeners: list[Callable[[StepRecord], None]] = []
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, except for what the server has registered."""
        self.reply = "hello world, def words"
        self.requests: list[GenerateRequest] = []
        self.live: list[str] = []
        self.cancelled: list[str] = []
        self.script: Script = self.default_script
        self.refuse: RoseinferError | None = None
        self.route: Route | None = None
        self.alive = True
        self.fleet: list[EngineReport] | None = None
        self.returns = False
        self.heartbeat_age_s = 0.1
        self.folders: dict[str, Adapter] = {}
        self._names = AdapterNames(self.info.adapters)
        self._released = asyncio.Event()

    def submit(self, request: GenerateRequest, sink: Sink) -> "FakeSubmission":
        if self.refuse is not None:
            raise self.refuse
        assert request.request_id not in self.live, "two live requests with one id"
        self.requests.append(request)
        self.live.append(request.request_id)
        return FakeSubmission(self, request, self.script(request), sink)

    def release(self) -> None:
        self._released.set()

    async def wait(self) -> None:
        await self._released.wait()

    def health(self) -> EngineHealth:
        final = not self.alive and not self.returns
        return EngineHealth(self.alive, self.heartbeat_age_s, None if self.alive else "gone", final)

    def stats(self) -> SchedulerStats:
        return self.snapshot

    @property
    def several(self) -> bool:
        return len(self.reports()) > 1

    def reports(self) -> list[EngineReport]:
        """Return the reports of `fleet` if it is set, else only this engine's."""
        if self.fleet is not None:
            return self.fleet
        state = EngineState.READY if self.alive else EngineState.DEAD
        return [EngineReport(self.number, state, self.health(), self.snapshot)]

    def adapters(self) -> Mapping[str, Adapter]:
        return self._names.adapters

    async def put_adapter(self, name: str, path: str) -> Adapter:
        """Load one of `folders`, which has any name."""
        check_adapter_name(name)
        if path not in self.folders:
            raise InvalidRequestError(f"no adapter in {path!r}", "path", "adapter_not_loaded")
        adapter = self.folders[path]._replace(name=name, path=path)
        self._names.set(name, adapter)
        return adapter

    async def drop_adapter(self, name: str) -> Adapter:
        adapter = self._names.find(name)
        self._names.set(name, None)
        return adapter

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        self._listeners.append(listener)

    def on_routing(self, observer: RoutingObserver) -> None:
        self.routing = observer
        for report in self.reports():
            observer.engine_added(report.engine)

    def step(self, record: StepRecord) -> None:
        for listener in self._listeners:
            listener(record)

    async def close(self) -> None:
        self.closed = True

    def default_script(self, request: GenerateRequest) -> list[Step]:
        """Samples in turn, a token each; the end comes with the last token."""
        if request.prompt.pooling is not None:
            return [pooled(request)]
        samples = [self.sample(request, index) for index in range(request.n)]
        longest = max(len(sample) for sample in samples)
        return [sample[i] for i in range(longest) for sample in samples if i < len(sample)]

    def sample(self, request: GenerateRequest, index: int, reply: str | None = None) -> list[Step]:
        if request.parser is not None:
            return list(self.parsed(request, index, self.reply if reply is None else reply))
        ids = self.tokenizer.encode(self.reply if reply is None else reply, add_special_tokens=False)
        ids, complete = ids[: request.prompt.params.max_tokens], len(ids) <= request.prompt.params.max_tokens
        chunks: list[SequenceChunk] = []
        for i, token in enumerate(ids):
            chunk = SequenceChunk(index, self.tokenizer.decode([token]), [token], num_output_tokens=i + 1)
            if request.prompt.params.logprobs is not None:
                chunk.logprobs = [fake_logprobs(token, i, request.prompt.params.logprobs)]
            chunks.append(chunk)
        if not chunks:
            chunks.append(SequenceChunk(index))
        if index == 0 and request.prompt.params.prompt_logprobs is not None:
            chunks[0].prompt_logprobs = fake_prompt_logprobs(request.prompt.ids, request.prompt.params.prompt_logprobs)
        reason = FinishReason.STOP if complete and ids else FinishReason.LENGTH
        chunks[-1] = replace(chunks[-1], finish_reason=reason, times=TIMES, preemptions=1)
        return list(chunks)

    def parsed(self, request: GenerateRequest, index: int, reply: str) -> Iterator[SequenceChunk]:
        """Parse the output as the engine's own client does for a request with a parser."""
        assert request.parser is not None
        ids = self.tokenizer.encode(reply, add_special_tokens=False)
        reason = FinishReason.STOP if len(ids) <= request.prompt.params.max_tokens else FinishReason.LENGTH
        ids = ids[: request.prompt.params.max_tokens]
        text = ParsedSequenceText(index, request.prompt.params, self.tokenizer, request.parser())
        started = FirstToken(0, *TIMES[:3])
        for i, token in enumerate(ids):
            end = End(reason, TIMES, preemptions=1) if i == len(ids) - 1 else None
            scores = None
            if request.prompt.params.logprobs is not None:
                scores = (fake_logprobs(token, i, request.prompt.params.logprobs),)
            output = SequenceOutput("", (token,), scores, None, started if i == 0 else None, end)
            chunk = text.take(output, TIMES.finished_s)
            assert chunk is not None
            yield chunk
            if text.ended:
                return


class FakeSubmission:
    """Plays a script into a sink, a step in each turn of the event loop."""

    def __init__(self, engine: FakeEngine, request: GenerateRequest, steps: list[Step], sink: Sink) -> None:
        self._engine = engine
        self._id = request.request_id
        self._sink = sink
        self._task = asyncio.create_task(self._play(steps))

    async def _play(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Wait):
                await self._engine.wait()
            elif isinstance(step, Exception):
                self._end()
                self._sink.fail(step)  # type: ignore[arg-type]
                return
            elif callable(step):
                step()
            else:
                await asyncio.sleep(0)
                if step is steps[-1]:
                    self._end()
                self._sink.put(step)
        self._end()

    @property
    def route(self) -> Route | None:
        return self._engine.route

    def cancel(self) -> None:
        if self._id in self._engine.live:
            self._engine.cancelled.append(self._id)
            self._end()
            self._task.cancel()
            self._sink.fail(EngineClosedError("cancelled"))

    def _end(self) -> None:
        if self._id in self._engine.live:
            self._engine.live.remove(self._id)


def pooled(request: GenerateRequest) -> SequenceChunk:
    """The result of a prompt-only request: see `fake_vector`."""
    assert request.prompt.pooling is not None
    vector = fake_vector(request.prompt.ids, request.prompt.pooling.dimensions or WIDTH)
    return SequenceChunk(0, finish_reason=FinishReason.STOP, vector=vector.tobytes(), times=TIMES, cached_tokens=1)


def fake_vector(ids: list[int], width: int) -> "array[float]":
    """A vector that depends on all token ids and their order."""
    return array("f", [math.sin(sum((i + 1) * id for i, id in enumerate(ids)) + k) for k in range(width)])


def fake_logprobs(token: int, position: int, top: int) -> TokenLogprobs:
    """The chosen token is the second best."""
    best = [((token + 5 + k) % 300, -0.5 - k) for k in range(top)]
    if top > 1:
        best[1] = (token, -1.5)
    return TokenLogprobs(token, -1.5, 2, tuple(best))


def fake_prompt_logprobs(ids: list[int], top: int) -> list[TokenLogprobs | None]:
    return [None, *(fake_logprobs(token, i, top) for i, token in enumerate(ids[1:]))]


def rejected(
    reason: str = "ttft",
    predicted_s: float = 2.5,
    cause: Cause = Cause.PRICE,
    index: int = 0,
    attainable_s: float | None = None,
) -> SequenceChunk:
    """The end of a sample that the scheduler turned away."""
    why = Rejection(reason, predicted_s, cause, attainable_s)
    return SequenceChunk(index, finish_reason=FinishReason.REJECTED, rejection=why)


def timed_out(tokens: int = 0, index: int = 0) -> SequenceChunk:
    """The end of a sample whose time was over after so many tokens."""
    return SequenceChunk(index, finish_reason=FinishReason.TIMEOUT, num_output_tokens=tokens)


def dead(request: GenerateRequest) -> list[Step]:
    return [EngineDeadError("/secret/path: the engine process died")]
