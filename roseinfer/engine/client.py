"""Asynchronous client of one engine: it sends requests, delivers chunks and follows the engine's health."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from roseinfer.core.adapters import Adapter
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    RequestTooLongError,
)
from roseinfer.core.outputs import FirstToken, SchedulerStats, SequenceOutput
from roseinfer.core.slo import Rejection
from roseinfer.engine.adapter_client import AdapterClient
from roseinfer.engine.adapter_names import AdapterEntry, check_adapter_name
from roseinfer.engine.api import (
    EngineHealth,
    EngineInfo,
    EngineReport,
    EngineState,
    GenerateRequest,
    RoutingObserver,
    Sink,
    StepRecord,
)
from roseinfer.engine.live import ChunkBuffer, ChunkStream, InflightLimit, LiveRequest, LiveRequests
from roseinfer.engine.messages import (
    Abort,
    AdapterAnswer,
    AdapterUpdate,
    Add,
    EngineMessage,
    Failed,
    Heartbeat,
    Invalid,
    Outputs,
    PriorOutput,
)
from roseinfer.engine.output import OutputDelivery, SequenceText
from roseinfer.engine.transport import Transport
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class EngineMonitor:
    """Starts an engine through its transport and follows its health. Belongs to one event loop."""

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
        """Start the engine. Raise the error that kept it from starting."""
        self.info = await self._transport.start(self._on_message, self._on_death)
        self._heartbeat_s = self._clock.now()

    def health(self) -> EngineHealth:
        alive = self._death is None and not self._closed
        return EngineHealth(alive, self._clock.now() - self._heartbeat_s, self._death, final=not alive)

    def stats(self) -> SchedulerStats:
        return self._stats

    def reports(self) -> list[EngineReport]:
        health = self.health()
        return [EngineReport(0, EngineState.READY if health.alive else EngineState.DEAD, health, self._stats)]

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        self._step_listeners.append(listener)

    def on_routing(self, observer: RoutingObserver) -> None:
        """Do nothing: a single engine places no requests."""

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._transport.close()

    # --- from the engine ----------------------------------------------------------------------------------------
    def _on_message(self, message: EngineMessage) -> None:
        try:
            self._handle(message)
        except Exception as error:
            log.exception("cannot handle a message of the engine")
            self._give_up(f"cannot handle a message of the engine: {type(error).__name__}: {error}")

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, Outputs | Heartbeat):
            self._stats = message.stats
            self._heartbeat_s = self._clock.now()
            for step in message.steps:
                for listener in self._step_listeners:
                    listener(step)
        elif isinstance(message, Failed):
            self._failed(message)

    def _failed(self, message: Failed) -> None:
        self._on_death(f"the engine failed: {message.message}")

    def _give_up(self, reason: str) -> None:
        """Treat the engine as dead because its messages cannot be handled here. It may still run."""
        self._on_death(reason)

    def _on_death(self, reason: str) -> None:
        if self._death is None and not self._closed:
            self._death = reason


class FailoverHandler(Protocol):
    """Handler of requests that an engine does not complete. Called from the event loop."""

    def lost(self, engine: "AsyncEngine", requests: list[LiveRequest], reason: str, suspects: Collection[str]) -> None:
        """Handle the requests of a lost engine. `suspects`: wire ids of the requests, of any client, that may have
        crashed it; empty = unknown.
        """
        ...

    def rejected(self, live: LiveRequest, rejection: Rejection) -> Rejection | None:
        """Handle a request that the engine's policy rejected, and return the rejection to report to its reader.

        Return None if the request was sent to another engine or has ended; its engine must have withdrawn it.
        """
        ...

    def cancelled(self, live: LiveRequest) -> None:
        """Handle a request that its reader cancelled."""
        ...

    def started(self, live: LiveRequest, cached_tokens: int) -> None:
        """Handle the first token from this engine, which had `cached_tokens` prompt tokens in its cache."""
        ...

    def adapters_changed(self, entries: Mapping[str, AdapterEntry]) -> None:
        """Handle a change of an engine's names of adapters."""
        ...


class AsyncEngine(EngineMonitor, OutputDelivery[LiveRequest]):
    """Client of one engine, see `engine.api.Engine`. Made by `AsyncEngine.start`; belongs to that event loop.

    `requests` may be shared with other engines, between which `failover` moves them.
    """

    several = False

    def __init__(self, transport: Transport, requests: LiveRequests, failover: FailoverHandler | None = None) -> None:
        EngineMonitor.__init__(self, transport, requests.clock)
        OutputDelivery.__init__(self)
        self._requests = requests
        self._failover = failover
        self._suspects: Collection[str] = ()
        self.adapter_client = AdapterClient(transport)

    @classmethod
    async def start(
        cls,
        transport: Transport,
        tokenizer: Tokenizer,
        clock: Clock | None = None,
        max_inflight_requests: int | None = None,
        *,
        inflight: InflightLimit | None = None,
        prefix: str = "",
    ) -> "AsyncEngine":
        """Start an engine. Raise the error that kept it from starting.

        `generate` raises `TooManyInflightError` above `max_inflight_requests` or the limit of `inflight`. `prefix`: of
        the engine's ids for our requests, unique among its clients.
        """
        inflight = inflight or InflightLimit(max_inflight_requests)
        engine = cls(transport, LiveRequests(tokenizer, clock, inflight, prefix))
        await engine.connect()
        return engine

    def generate(self, request: GenerateRequest) -> ChunkStream:
        buffer = ChunkBuffer(request.n)
        return ChunkStream(buffer, self.submit(request, buffer))

    def submit(self, request: GenerateRequest, sink: Sink) -> LiveRequest:
        self._check_usable()
        live = self._requests.make(request, sink, self.info)
        self.send(live)
        self._requests.add(live)
        return live

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._death is not None:
            raise EngineDeadError(self._death)

    def send(self, live: LiveRequest) -> None:
        """Send a request to this engine. Raise `InvalidRequestError` if it cannot be sent."""
        wire_id = self._requests.wire_id()
        try:
            self._transport.send(self._add_of(live, wire_id))
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
        live.engine, live.wire_id = self, wire_id
        for text in live.texts:
            if not text.ended:
                text.begin_on_engine()
                self._sequences[live.sequence_id(text)] = (live, text)

    def _add_of(self, live: LiveRequest, wire_id: str) -> Add:
        request, now_s = live.request, self._clock.now()
        meta = request.prompt.meta
        return Add(
            wire_id,
            request.prompt,
            request.n,
            live.seed,
            age_s=0.0 if meta.arrival_s is None else now_s - meta.arrival_s,
            left_s=None if meta.deadline_s is None else meta.deadline_s - now_s,
            sent_s=now_s,
            keys=live.keys,
            outputs=_outputs_of(live) if live.has_output else None,
            moved=live.was_sent,
        )

    def withdraw(self, live: LiveRequest) -> None:
        """Abort the open samples of a request. Later output of them is dropped."""
        left = self._forget(live)
        if left and self._death is None and not self._closed:
            self._transport.send(Abort(left))

    def cancel(self, live: LiveRequest) -> None:
        """Withdraw a request that its reader cancelled."""
        if self._failover is not None:
            self._failover.cancelled(live)
        self.withdraw(live)

    def _forget(self, live: LiveRequest) -> list[str]:
        """Forget a request, and return the engine's ids of its open samples."""
        left = [live.sequence_id(text) for text in live.texts if not text.ended]
        for sequence in left:
            self._sequences.pop(sequence, None)
        live.engine = None
        return left

    def _release(self) -> list[LiveRequest]:
        """Forget all requests and return them. Later output of them is dropped."""
        here = list(dict.fromkeys(live for live, _ in self._sequences.values()))
        self._sequences.clear()
        for live in here:
            live.engine = None
        return here

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended, including those of engines that share them."""
        return len(self._requests)

    async def connect(self) -> None:
        await super().connect()
        self.adapter_client.start(self.info.adapters)

    def adapters(self) -> Mapping[str, Adapter]:
        return self.adapter_client.names.adapters

    async def read_adapter(self, name: str, path: str) -> Adapter:
        """Let the engine load an adapter that is to get a name. Raise the errors of `put_adapter`."""
        self._check_usable()
        return await self.adapter_client.read(name, path)

    async def put_adapter(self, name: str, path: str) -> Adapter:
        check_adapter_name(name)
        adapter = await self.read_adapter(name, path)
        await self.adapter_client.set(name, adapter)
        return adapter

    async def drop_adapter(self, name: str) -> Adapter:
        self._check_usable()
        adapter = self.adapter_client.names.find(name)
        await self.adapter_client.set(name, None)
        return adapter

    async def close(self) -> None:
        if not self._closed:
            self.adapter_client.fail(EngineClosedError("the engine was closed"))
            for live in self._release():
                live.fail(EngineClosedError("the engine was closed"))
        await super().close()

    # --- from the engine ----------------------------------------------------------------------------------------
    def _handle(self, message: EngineMessage) -> None:
        super()._handle(message)
        if isinstance(message, Outputs):
            self._deliver(message.outputs, message.now_s, self._clock.now() - message.now_s)
        elif not isinstance(message, Heartbeat):
            self._handle_rare(message)

    def _handle_rare(self, message: EngineMessage) -> None:
        """Handle a message other than those of most requests."""
        if isinstance(message, Invalid):
            self._fail_invalid(message)
        elif isinstance(message, AdapterAnswer):
            self.adapter_client.take_answer(message)
        elif isinstance(message, AdapterUpdate):
            self.adapter_client.take_names(message.entries)
            if self._failover is not None:
                self._failover.adapters_changed(message.entries)

    def _failed(self, message: Failed) -> None:
        self._suspects = {sequence.rpartition(":")[0] for sequence in message.suspects}
        super()._failed(message)

    def _end_early(self, request: LiveRequest, text: SequenceText, output: SequenceOutput) -> SequenceOutput | None:
        end = output.end
        if self._failover is None or end is None or end.rejection is None:
            return super()._end_early(request, text, output)
        rejection = self._failover.rejected(request, end.rejection)
        return None if rejection is None else output._replace(end=end._replace(rejection=rejection))

    def _started(self, request: LiveRequest, started: FirstToken) -> None:
        if self._failover is not None:
            self._failover.started(request, started.cached_tokens)

    def _end_sequence(self, sequence: str, request: LiveRequest) -> None:
        del self._sequences[sequence]
        request.left -= 1
        if not request.left:
            self._requests.remove(request)

    def _fail_sample(
        self, request: LiveRequest, text: SequenceText, output: SequenceOutput, error: RequestFailedError
    ) -> None:
        """End the whole request: its other samples are useless without this one."""
        if output.end is not None:
            text.ended = True
            self._sequences.pop(output.request_id, None)
        self.withdraw(request)
        request.fail(error)

    def _abort(self, sequences: list[str]) -> None:
        self._transport.send(Abort(sequences))

    def _fail_invalid(self, message: Invalid) -> None:
        live = next((live for live, _ in self._sequences.values() if live.wire_id == message.request_id), None)
        if live is None:
            return
        kind = RequestTooLongError if message.code == "context_length_exceeded" else None
        error = kind(message.message, message.param) if kind else None
        self._forget(live)
        live.fail(error or InvalidRequestError(message.message, message.param, message.code))

    def _give_up(self, reason: str) -> None:
        """Also abort the open samples, so that the engine does not compute them for nobody."""
        if self._sequences and self._death is None and not self._closed:
            self._transport.send(Abort(list(self._sequences)))
        super()._give_up(reason)

    def _on_death(self, reason: str) -> None:
        if self._death is not None or self._closed:
            return
        super()._on_death(reason)
        self.adapter_client.fail(EngineDeadError(reason))
        lost = self._release()
        if self._failover is not None:
            self._failover.lost(self, lost, reason, self._suspects)
            return
        for live in lost:
            live.fail(EngineDeadError(reason))


def _outputs_of(live: LiveRequest) -> list[PriorOutput | None]:
    """Return the output of each sample so far; None for a sample that has ended."""
    return [None if text.ended else PriorOutput(text.ids, text.ttft_s) for text in live.texts]
