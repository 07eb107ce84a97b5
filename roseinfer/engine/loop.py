"""Loop of the engine: read messages, run a step, send its output."""

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from roseinfer.core.adapters import AdapterRead
from roseinfer.core.clock import Clock
from roseinfer.core.errors import InvalidRequestError, TooManyReadsError
from roseinfer.core.garbage import IdleGarbageCollector
from roseinfer.core.outputs import SchedulerStats, SequenceOutput
from roseinfer.core.promise import Promise
from roseinfer.core.request import sequence_id
from roseinfer.engine.adapters import NO_ADAPTERS
from roseinfer.engine.api import StepRecord
from roseinfer.engine.core import IDLE_TURN_WAIT_S, EngineCore
from roseinfer.engine.messages import (
    OWNER,
    Abort,
    AdapterAnswer,
    AdapterUpdate,
    Add,
    ClientMessage,
    Disconnected,
    DrainEngine,
    EngineMessage,
    Failed,
    Heartbeat,
    Invalid,
    Outputs,
    ReadAdapter,
    Received,
    Shutdown,
    UndrainEngine,
)
from roseinfer.sched.idle_audit import IdleAudit

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
# Minimum time between promises, per waiting request. A policy may look at each waiting request (0.2 us each). Routers
# add what they have sent since the last promise.
PROMISE_INTERVAL_PER_WAITING_S = 1e-5


class Inbox(Protocol):
    def receive(self, timeout_s: float) -> list[Received]:
        """Return all messages that have arrived, with their clients. Wait up to `timeout_s` for the first."""
        ...


class Outbox(Protocol):
    """Messages to clients. Neither call waits for a client."""

    def send(self, client: int, message: EngineMessage) -> None: ...

    def broadcast(self, message: EngineMessage, exclude: int | None = None) -> None:
        """Send to all connected clients except `exclude`."""
        ...

    def greet(self, message: EngineMessage, change: EngineMessage | None = None) -> None:
        """Send to all clients, also to those that connect before the next message of this type.

        `change`: what clients that are connected get in its place.
        """
        ...


class EngineLoop:
    """Loop that runs until the owner sends `Shutdown` or disconnects. An idle loop sleeps on its inbox between
    heartbeats.

    Each client with output gets one message per step, at once. Rejections are sent before the loop waits for the step.

    `garbage`: collects garbage while the loop is idle; None if other code of this process needs the interpreter.
    `audit`: checks the state of an idle engine. `publish`: called with the engine's promise during every step (less
    often with a long queue), when the engine becomes idle, and with every heartbeat.
    """

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        garbage: IdleGarbageCollector | None = None,
        audit: IdleAudit | None = None,
        publish: Callable[[Promise], None] | None = None,
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._garbage = garbage
        self._audit = audit
        self._publish = publish
        self._draining = False
        self._next_promise_s = 0.0
        self._client_of: dict[str, int] = {}  # live sequence -> its client
        self._seen_clients: set[int] = set()  # clients that have sent a request
        self._steps: list[StepRecord] = []
        self._last = core.stats()
        self._last_heartbeat_s = 0.0
        self._stopping = False

    def run(self) -> bool:
        """Return False if an unexpected error ended the loop. The error is logged and sent to all clients as
        `Failed`.
        """
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # also errors of the accelerator, such as out of memory
            log.exception("the engine loop failed")
            try:
                self._outbox.broadcast(Failed(f"{type(error).__name__}: {error}"[:500], self._core.suspects()))
            finally:
                with contextlib.suppress(Exception):  # waiting for a failed accelerator fails too
                    self._core.close()
            return False
        except BaseException:
            self._core.close()
            raise
        self._core.close()
        return True

    def _turn(self) -> None:
        for client, message in self._inbox.receive(self._receive_timeout_s()):
            self._handle(client, message)
        if self._stopping:
            return
        # Requests that routers place after this time have not been read, so this step's promise does not include them.
        now_s = self._clock.now()
        if self._core.busy:
            self._step(now_s)
        else:
            self._idle()
        self._send_heartbeat(now_s)

    def _idle(self) -> None:
        if self._garbage is not None:
            self._garbage.idle()
        if self._audit is not None:
            self._audit.idle()

    def _step(self, now_s: float) -> None:
        """Run one turn of the core, which begins at `now_s`."""
        outputs = self._core.launch()
        for new, error in self._core.take_invalid():
            self._report_invalid(new, error)
        if outputs:
            self._send(outputs, self._core.stats())
        if now_s >= self._next_promise_s:
            self._promise(now_s)
        outputs = self._core.settle()
        stats = self._core.stats()
        if stats.steps_done != self._last.steps_done:
            self._steps.append(_record(self._last, stats, self._clock.now()))
        self._last = stats
        if outputs:
            self._send(outputs, stats)
        if not self._core.busy:
            self._promise(now_s)
        if self._garbage is not None:
            self._garbage.busy()
        if self._audit is not None:
            self._audit.busy()

    def _promise(self, now_s: float) -> None:
        if self._publish is not None:
            promise = self._core.promise(now_s)
            self._next_promise_s = now_s + PROMISE_INTERVAL_PER_WAITING_S * promise.waiting
            self._publish(promise._replace(draining=True) if self._draining else promise)

    def _send(self, outputs: list[SequenceOutput], stats: SchedulerStats) -> None:
        now_s = self._clock.now()
        ended = [output.request_id for output in outputs if output.end is not None]
        if ended and OWNER not in self._seen_clients:
            # First the step records, then the end: a reader that sees the end finds complete counts.
            self._outbox.send(OWNER, Heartbeat(stats, now_s, self._take_steps(OWNER)))
        for client, own in self._by_client(outputs).items():
            self._outbox.send(client, Outputs(own, stats, now_s, self._take_steps(client)))
        for sequence in ended:
            self._client_of.pop(sequence, None)

    def _by_client(self, outputs: list[SequenceOutput]) -> dict[int, list[SequenceOutput]]:
        if len(self._seen_clients) == 1:
            return dict.fromkeys(self._seen_clients, outputs)
        owners = self._client_of
        parts: dict[int, list[SequenceOutput]] = {}
        for output in outputs:
            owner = owners.get(output.request_id)
            if owner is not None:  # None: the client has disconnected
                parts.setdefault(owner, []).append(output)
        return parts

    def _take_steps(self, client: int) -> list[StepRecord]:
        if client != OWNER:
            return []
        steps, self._steps = self._steps, []
        return steps

    def _send_heartbeat(self, read_s: float) -> None:
        """Send a heartbeat if it is due. `read_s`: time when messages were read."""
        now_s = self._clock.now()
        if now_s - self._last_heartbeat_s < HEARTBEAT_S:
            return
        self._last_heartbeat_s = now_s
        stats = self._core.stats()
        self._outbox.send(OWNER, Heartbeat(stats, now_s, self._take_steps(OWNER)))
        self._outbox.broadcast(Heartbeat(stats, now_s), exclude=OWNER)
        if not self._core.busy:
            self._promise(read_s)

    def _receive_timeout_s(self) -> float:
        if not self._core.busy:
            if self._audit is not None and self._audit.under_way:
                return 0.0
            return max(0.0, self._last_heartbeat_s + HEARTBEAT_S - self._clock.now())
        return IDLE_TURN_WAIT_S if self._core.idle_turn else 0.0

    def _handle(self, client: int, message: ClientMessage | Invalid | Disconnected) -> None:
        if isinstance(message, Add):
            self._add(client, message)
        elif isinstance(message, Abort):
            self._core.abort(message.sequence_ids)
        else:
            self._handle_rare(client, message)

    def _handle_rare(self, client: int, message: ClientMessage | Invalid | Disconnected) -> None:
        """Handle a message other than those of most requests."""
        if isinstance(message, Invalid):
            self._outbox.send(client, message)
        elif isinstance(message, Disconnected):
            self._disconnect(client)
        elif isinstance(message, ReadAdapter):
            self._read_adapter(client, message)
        elif isinstance(message, AdapterUpdate):
            self._update_adapters(message)
        elif client == OWNER:
            self._handle_owner(message)

    def _handle_owner(self, message: ClientMessage) -> None:
        """Handle a message that only the owner may send."""
        if isinstance(message, Shutdown):
            self._stopping = True
        elif isinstance(message, DrainEngine | UndrainEngine):
            self._draining = isinstance(message, DrainEngine)
            self._promise(self._clock.now())

    def _read_adapter(self, client: int, message: ReadAdapter) -> None:
        def answer(read: AdapterRead) -> None:
            self._outbox.send(client, AdapterAnswer(message.number, read.adapter, read.error))

        if self._core.adapters is None:
            self._outbox.send(client, AdapterAnswer(message.number, error=NO_ADAPTERS))
            return
        try:
            self._core.adapters.read_for(message.name, message.path, answer)
        except TooManyReadsError as error:
            self._outbox.send(client, AdapterAnswer(message.number, error=str(error), busy=True))

    def _update_adapters(self, message: AdapterUpdate) -> None:
        adapters = self._core.adapters
        if adapters is None:
            return
        newer = adapters.names.merge(message.entries)
        if newer:
            self._outbox.greet(AdapterUpdate(adapters.names.entries), AdapterUpdate(newer))

    def _add(self, client: int, message: Add) -> None:
        self._seen_clients.add(client)
        try:
            self._core.add(message)
        except InvalidRequestError as error:
            self._outbox.send(client, Invalid(message.request_id, error.message, error.param, error.code))
            return
        for index in range(message.n):
            if message.outputs is None or message.outputs[index] is not None:
                self._client_of[sequence_id(message.request_id, index)] = client

    def _report_invalid(self, new: Add, error: InvalidRequestError) -> None:
        """Report a request as invalid that had been accepted: its grammar does not compile."""
        clients = [self._client_of.pop(sequence_id(new.request_id, index), None) for index in range(new.n)]
        client = next((each for each in clients if each is not None), None)
        if client is not None:  # None: the client has disconnected
            self._outbox.send(client, Invalid(new.request_id, error.message, error.param, error.code))

    def _disconnect(self, client: int) -> None:
        """Abort the client's requests. Stop if the client is the owner."""
        left = [sequence for sequence, owner in self._client_of.items() if owner == client]
        for sequence in left:
            del self._client_of[sequence]
        self._core.abort(left)
        self._stopping = self._stopping or client == OWNER


def _record(before: SchedulerStats, now: SchedulerStats, ended_s: float) -> StepRecord:
    """Return the record of the step that completed between `before` and `now`."""
    # The policy's stats describe its newest plan. With two steps in flight the completed step was planned a turn
    # earlier.
    planned = before if before.step == now.steps_done else now
    return StepRecord(
        now.step_tokens,
        now.step_duration_s,
        now.policy.predicted_step_s if now.policy else 0.0,
        now.guides.mask_s if now.guides else 0.0,
        ended_s,
        now.step_rows,
        now.prompt_tokens - before.prompt_tokens,
        planned.policy.step_budget_s if planned.policy else None,
    )
