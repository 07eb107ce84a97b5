"""The asynchronous engine: requests in, chunks out, wherever the engine runs; and what is known of its health."""

import itertools
import logging
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace

from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    OutputTextError,
    RequestFailedError,
    RequestTooLongError,
    RoseinferError,
    TooManyInflightError,
    request_failure,
)
from roseinfer.core.outputs import FinishReason, RequestOutput, SchedulerStats
from roseinfer.core.request import check_context, sequence_id
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport, EngineState, GenerateRequest, Sink, StepRecord
from roseinfer.engine.mailbox import Mailbox, MailboxStream
from roseinfer.engine.messages import Abort, Add, EngineMessage, Failed, Heartbeat, Outputs, Rejected
from roseinfer.engine.output import SequenceText
from roseinfer.engine.parsed import ParsedText
from roseinfer.engine.prepare import prepare
from roseinfer.engine.transport import Transport
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class EngineWatch:
    """Brings an engine up through its transport and follows how it does. Belongs to one event loop."""

    def __init__(self, transport: Transport, clock: Clock | None = None) -> None:
        self.info: EngineInfo
        self._transport = transport
        self._clock = clock or MonotonicClock()
        self._stats = SchedulerStats()
        self._step_listeners: list[Callable[[StepRecord], None]] = []
        self._heartbeat_s = self._clock.now()
        self._death: str | None = None
        self._closed = False

    async def connect(self) -> None:
        """Raises what kept the engine from starting."""
        self.info = await self._transport.start(self._on_message, self._on_death)
        self._heartbeat_s = self._clock.now()

    def health(self) -> EngineHealth:
        alive = self._death is None and not self._closed
        return EngineHealth(alive, self._clock.now() - self._heartbeat_s, self._death)

    def stats(self) -> SchedulerStats:
        return self._stats

    def reports(self) -> list[EngineReport]:
        health = self.health()
        return [EngineReport(0, EngineState.READY if health.alive else EngineState.DEAD, health, self._stats)]

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        self._step_listeners.append(listener)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._transport.close()

    # --- from the engine ----------------------------------------------------------------------------------------
    def _on_message(self, message: EngineMessage) -> None:
        try:
            self._handle(message)
        except Exception as error:
            log.exception("a message of the engine could not be handled")
            self._on_death(f"a message of the engine could not be handled: {type(error).__name__}: {error}")

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, Outputs | Heartbeat):
            self._note_alive(message)
        elif isinstance(message, Failed):
            self._on_death(f"the engine failed: {message.message}")

    def _note_alive(self, message: Outputs | Heartbeat) -> None:
        self._stats = message.stats
        self._heartbeat_s = message.now_s
        for step in message.steps:
            for listener in self._step_listeners:
                listener(step)

    def _on_death(self, reason: str) -> None:
        if self._death is None and not self._closed:
            self._death = reason


class LiveRequest:
    """A request in the engine, until its last sample ends or it fails."""

    __slots__ = ("_engine", "left", "request_id", "sink", "texts", "wire_id")

    def __init__(
        self, engine: "AsyncEngine", request_id: str, wire_id: str, texts: list[SequenceText], sink: Sink
    ) -> None:
        self._engine = engine
        self.request_id = request_id
        self.wire_id = wire_id
        self.texts = texts
        self.sink = sink
        self.left = len(texts)

    def sequence_id(self, text: SequenceText) -> str:
        """What the engine calls one of the samples."""
        return sequence_id(self.wire_id, text.index)

    def cancel(self) -> None:
        self._engine.cancel(self)


class Inflight:
    """How many requests may be in the engine at a time, and how many are. `limit` None = any number.

    Who shares the limit with others puts a class in its place that knows of theirs.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.own = 0

    def total(self) -> int:
        return self.own

    def note(self, own: int) -> None:
        self.own = own

    def check(self) -> None:
        """Raises `TooManyInflightError` if one more is too many."""
        if self.limit is not None and self.total() >= self.limit:
            raise TooManyInflightError(f"{self.total()} requests are in the engine, its limit")


class AsyncEngine(EngineWatch):
    """See `engine.api.Engine`. Made by `AsyncEngine.start`; all methods belong to the event loop it was started in."""

    def __init__(
        self, transport: Transport, tokenizer: Tokenizer, clock: Clock | None, inflight: Inflight, prefix: str
    ) -> None:
        super().__init__(transport, clock)
        self._inflight = inflight
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._live: dict[str, LiveRequest] = {}
        self._numbers = itertools.count()
        self._sequences: dict[str, tuple[LiveRequest, SequenceText]] = {}

    @classmethod
    async def start(
        cls,
        transport: Transport,
        tokenizer: Tokenizer,
        clock: Clock | None = None,
        max_inflight_requests: int | None = None,
        *,
        inflight: Inflight | None = None,
        prefix: str = "",
    ) -> "AsyncEngine":
        """Bring an engine up. Raises what kept it from starting.

        With `max_inflight_requests`, `generate` raises `TooManyInflightError` while so many have not ended; `inflight`
        may be given instead. `prefix`: what tells requests from those of other clients of the engine.
        """
        engine = cls(transport, tokenizer, clock, inflight or Inflight(max_inflight_requests), prefix)
        await engine.connect()
        return engine

    def generate(self, request: GenerateRequest) -> MailboxStream:
        mailbox = Mailbox(request.n)
        return MailboxStream(mailbox, self.submit(request, mailbox))

    def submit(self, request: GenerateRequest, sink: Sink) -> LiveRequest:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._death is not None:
            raise EngineDeadError(self._death)
        if request.params.bad_words or request.params.truncate_prompt_tokens is not None:
            ready = prepare(request.prompt_ids, request.params, self._tokenizer, self.info.max_model_len)
            request = replace(request, prompt_ids=ready.prompt_ids, params=ready.params)
        self._check(request)
        texts = [self._text(request, i) for i in range(request.n)]
        # The engine knows a request by an id that is used once: a cancelled one may still be on its way there and
        # back when its request_id is used again. It is short because it comes back with every token.
        wire_id = f"{self._prefix}{next(self._numbers)}"
        live = LiveRequest(self, request.request_id, wire_id, texts, sink)
        self._send_add(request, wire_id)
        self._live[request.request_id] = live
        for text in texts:
            self._sequences[live.sequence_id(text)] = (live, text)
        self._inflight.note(len(self._live))
        return live

    def _text(self, request: GenerateRequest, index: int) -> SequenceText:
        if request.parser is None:
            return SequenceText(index, request.params, self._tokenizer)
        return ParsedText(index, request.params, self._tokenizer, request.parser())

    def _send_add(self, request: GenerateRequest, wire_id: str) -> None:
        try:
            meta = request.meta
            if meta.arrival_s is None:
                meta = replace(meta, arrival_s=self._clock.now())
            prompt_ids = list(map(operator.index, request.prompt_ids))
            self._transport.send(Add(wire_id, prompt_ids, request.params, request.n, meta, request.guide))
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error

    def _check(self, request: GenerateRequest) -> None:
        self._inflight.check()
        if request.request_id in self._live:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        if request.n < 1:
            raise InvalidRequestError("n must be positive", "n")
        if not request.prompt_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        check_context(len(request.prompt_ids), request.params.max_tokens, self.info.max_model_len)

    def cancel(self, live: LiveRequest) -> None:
        """Abort what is left of a request."""
        if self._live.get(live.request_id) is not live:
            return
        left = [live.sequence_id(text) for text in live.texts if not text.ended]
        self._fail(live, EngineClosedError("the request was cancelled"))
        if left and self._death is None and not self._closed:
            self._transport.send(Abort(left))

    def _fail(self, live: LiveRequest, error: RoseinferError) -> None:
        self._forget(live)
        live.sink.fail(error)

    def _forget(self, live: LiveRequest) -> None:
        self._live.pop(live.request_id, None)
        for text in live.texts:
            self._sequences.pop(live.sequence_id(text), None)
        self._inflight.note(len(self._live))

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    async def close(self) -> None:
        if not self._closed:
            self._fail_all(EngineClosedError("the engine was closed"))
        await super().close()

    # --- from the engine ----------------------------------------------------------------------------------------
    def _handle(self, message: EngineMessage) -> None:
        super()._handle(message)
        if isinstance(message, Outputs):
            self._deliver(message.outputs, message.now_s)
        elif isinstance(message, Rejected):
            self._reject(message)

    def _deliver(self, outputs: Iterable[RequestOutput], now_s: float) -> None:
        """The one place where outputs become chunks. Once per token: every layer here costs each of them."""
        sequences = self._sequences
        aborts: list[str] = []
        for output in outputs:
            found = sequences.get(output.request_id)
            if found is None:
                continue  # cancelled meanwhile
            live, text = found
            if output.end is not None and output.end.reason is FinishReason.ERROR:
                text.ended = True
                self._fail_request(live, request_failure(output.end.error or "the request failed"))
                continue
            try:
                chunk = text.take(output, now_s)
            except Exception as error:  # the tokenizer's, which is the model's: it must not end every client
                log.exception("request %s: its output could not be turned into text", live.request_id)
                self._fail_request(live, OutputTextError(error))
                continue
            if chunk is None:
                continue
            if text.ended:
                self._end_sequence(output.request_id, live)
                if output.end is None:
                    aborts.append(output.request_id)
            live.sink.put(chunk)
        if aborts:
            self._transport.send(Abort(aborts))

    def _end_sequence(self, sequence: str, live: LiveRequest) -> None:
        del self._sequences[sequence]
        live.left -= 1
        if not live.left:
            self._live.pop(live.request_id, None)
            self._inflight.note(len(self._live))

    def _fail_request(self, live: LiveRequest, error: RequestFailedError) -> None:
        """End a request of which one sample failed: the other samples have no use without it."""
        left = [live.sequence_id(text) for text in live.texts if not text.ended]
        self._fail(live, error)
        if left:
            self._transport.send(Abort(left))

    def _reject(self, message: Rejected) -> None:
        found = self._sequences.get(sequence_id(message.request_id, 0))
        if found is not None:
            live, _ = found
            kind = RequestTooLongError if message.code == "context_length_exceeded" else None
            error = kind(message.message, message.param) if kind else None
            self._fail(live, error or InvalidRequestError(message.message, message.param, message.code))

    def _on_death(self, reason: str) -> None:
        if self._death is None and not self._closed:
            super()._on_death(reason)
            self._fail_all(EngineDeadError(reason))

    def _fail_all(self, error: RoseinferError) -> None:
        for live in list(self._live.values()):
            self._fail(live, error)
