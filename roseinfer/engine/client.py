"""The asynchronous engine: requests in, streams of chunks out, wherever the engine itself runs."""

import asyncio
import itertools
import logging
import operator
from collections.abc import AsyncIterator, Callable

from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    RequestTooLongError,
    RoseinferError,
    TooManyInflightError,
)
from roseinfer.core.outputs import FinishReason, RequestOutput, SchedulerStats
from roseinfer.core.request import check_context
from roseinfer.engine.api import EngineHealth, EngineInfo, GenerateRequest, SequenceChunk
from roseinfer.engine.messages import Abort, Add, EngineMessage, Failed, Heartbeat, Outputs, Rejected, sequence_id
from roseinfer.engine.output import SequenceText, merge
from roseinfer.engine.transport import Transport
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Stream:
    """The mailbox of one request: at most one unread chunk per sample, so that a slow reader never delays others."""

    def __init__(self, engine: "AsyncEngine", request_id: str, wire_id: str, texts: list[SequenceText]) -> None:
        self.request_id = request_id
        self.texts = texts
        self._engine = engine
        self._wire_id = wire_id
        self._open = len(texts)
        self._unread: dict[int, SequenceChunk] = {}
        self._error: RoseinferError | None = None
        self._news = asyncio.Event()

    def sequence_id(self, text: SequenceText) -> str:
        """What the engine calls one of the samples."""
        return sequence_id(self._wire_id, text.index)

    @property
    def ended(self) -> bool:
        return self._open == 0 or self._error is not None

    def put(self, chunk: SequenceChunk) -> None:
        unread = self._unread.get(chunk.index)
        self._unread[chunk.index] = chunk if unread is None else merge(unread, chunk)
        if chunk.finish_reason is not None:
            self._open -= 1
        self._news.set()

    def fail(self, error: RoseinferError) -> None:
        """End the stream with an error; what was not read by then is lost."""
        if not self.ended:
            self._error = error
            self._news.set()

    def cancel(self) -> None:
        self._engine.cancel(self)

    def __aiter__(self) -> AsyncIterator[SequenceChunk]:
        return self

    async def __anext__(self) -> SequenceChunk:
        while True:
            if self._error is not None:
                raise self._error
            if self._unread:
                index = next(iter(self._unread))
                return self._unread.pop(index)
            if self.ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()


class AsyncEngine:
    """See `engine.api.Engine`. Made by `AsyncEngine.start`; all methods belong to the event loop it was started in."""

    def __init__(
        self, transport: Transport, tokenizer: Tokenizer, clock: Clock, max_inflight_requests: int | None = None
    ) -> None:
        self._max_inflight = max_inflight_requests
        self._transport = transport
        self._tokenizer = tokenizer
        self._clock = clock
        self._streams: dict[str, Stream] = {}
        self._numbers = itertools.count()
        self._sequences: dict[str, tuple[Stream, SequenceText]] = {}
        self._stats = SchedulerStats()
        self._step_listeners: list[Callable[[SchedulerStats], None]] = []
        self._heartbeat_s = clock.now()
        self._death: str | None = None
        self._closed = False
        self.info: EngineInfo

    @classmethod
    async def start(
        cls,
        transport: Transport,
        tokenizer: Tokenizer,
        clock: Clock | None = None,
        max_inflight_requests: int | None = None,
    ) -> "AsyncEngine":
        """Bring an engine up. Raises what kept it from starting.

        With `max_inflight_requests`, `generate` raises `TooManyInflightError` while so many have not ended.
        """
        engine = cls(transport, tokenizer, clock or MonotonicClock(), max_inflight_requests)
        engine.info = await transport.start(engine._on_message, engine._on_death)
        engine._heartbeat_s = engine._clock.now()
        return engine

    def generate(self, request: GenerateRequest) -> Stream:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._death is not None:
            raise EngineDeadError(self._death)
        self._check(request)
        texts = [SequenceText(i, request.params, self._tokenizer) for i in range(request.n)]
        # The engine knows a request by an id that is used once: a cancelled one may still be on its way there and
        # back when its request_id is used again.
        wire_id = f"{request.request_id}#{next(self._numbers)}"
        stream = Stream(self, request.request_id, wire_id, texts)
        self._send_add(request, wire_id)
        self._streams[request.request_id] = stream
        for text in texts:
            self._sequences[stream.sequence_id(text)] = (stream, text)
        return stream

    def _send_add(self, request: GenerateRequest, wire_id: str) -> None:
        try:
            add = Add(
                wire_id,
                list(map(operator.index, request.prompt_ids)),
                request.params,
                request.n,
                request.cache_salt,
                request.priority,
                self._clock.now() if request.arrival_s is None else request.arrival_s,
            )
            self._transport.send(add)
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error

    def _check(self, request: GenerateRequest) -> None:
        if self._max_inflight is not None and len(self._streams) >= self._max_inflight:
            raise TooManyInflightError(f"{len(self._streams)} requests are in the engine, its limit")
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        if request.n < 1:
            raise InvalidRequestError("n must be positive", "n")
        if not request.prompt_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        check_context(len(request.prompt_ids), request.params.max_tokens, self.info.max_model_len)

    def cancel(self, stream: Stream) -> None:
        """Abort what is left of a stream."""
        if self._streams.get(stream.request_id) is not stream:
            return
        left = [stream.sequence_id(text) for text in stream.texts if not text.ended]
        self._forget(stream)
        stream.fail(EngineClosedError("the request was cancelled"))
        if left and self._death is None and not self._closed:
            self._transport.send(Abort(left))

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.request_id, None)
        for text in stream.texts:
            self._sequences.pop(stream.sequence_id(text), None)

    def health(self) -> EngineHealth:
        alive = self._death is None and not self._closed
        return EngineHealth(alive, self._clock.now() - self._heartbeat_s, self._death)

    def stats(self) -> SchedulerStats:
        return self._stats

    def on_step(self, listener: Callable[[SchedulerStats], None]) -> None:
        self._step_listeners.append(listener)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fail_all(EngineClosedError("the engine was closed"))
        await self._transport.close()

    # --- from the engine ----------------------------------------------------------------------------------------
    def _on_message(self, message: EngineMessage) -> None:
        try:
            self._handle(message)
        except Exception as error:
            log.exception("a message of the engine could not be handled")
            self._on_death(f"a message of the engine could not be handled: {type(error).__name__}: {error}")

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, Outputs):
            self._note_alive(message.stats, message.now_s)
            self._deliver(message.outputs, message.now_s)
        elif isinstance(message, Heartbeat):
            self._note_alive(message.stats, message.now_s)
        elif isinstance(message, Rejected):
            self._reject(message)
        elif isinstance(message, Failed):
            self._on_death(f"the engine failed: {message.message}")

    def _note_alive(self, stats: SchedulerStats, now_s: float) -> None:
        if stats.step != self._stats.step:
            for listener in self._step_listeners:
                listener(stats)
        self._stats = stats
        self._heartbeat_s = now_s

    def _deliver(self, outputs: list[RequestOutput], now_s: float) -> None:
        """The one place where outputs become chunks."""
        aborts: list[str] = []
        for output in outputs:
            found = self._sequences.get(output.request_id)
            if found is None:
                continue  # cancelled meanwhile
            stream, text = found
            if output.end is not None and output.end.reason is FinishReason.ERROR:
                text.ended = True
                self._fail_request(stream, output.end.error or "the request failed")
                continue
            chunk = text.take(output, now_s)
            if chunk is None:
                continue
            stream.put(chunk)
            if text.ended:
                del self._sequences[output.request_id]
                if output.end is None:
                    aborts.append(output.request_id)
                if stream.ended:
                    self._streams.pop(stream.request_id, None)
        if aborts:
            self._transport.send(Abort(aborts))

    def _fail_request(self, stream: Stream, reason: str) -> None:
        stream.fail(RequestFailedError(reason))
        self.cancel(stream)

    def _reject(self, message: Rejected) -> None:
        found = self._sequences.get(sequence_id(message.request_id, 0))
        if found is not None:
            stream, _ = found
            kind = RequestTooLongError if message.code == "context_length_exceeded" else None
            error = kind(message.message, message.param) if kind else None
            self._forget(stream)
            stream.fail(error or InvalidRequestError(message.message, message.param, message.code))

    def _on_death(self, reason: str) -> None:
        if self._death is None and not self._closed:
            self._death = reason
            self._fail_all(EngineDeadError(reason))

    def _fail_all(self, error: RoseinferError) -> None:
        for stream in list(self._streams.values()):
            self._forget(stream)
            stream.fail(error)
