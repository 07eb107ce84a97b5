"""The engine's loop: drain the inbox, step, send what came of it."""

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from roseinfer.core.clock import Clock
from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.garbage import IdleGarbageCollector
from roseinfer.core.outputs import RequestOutput, SchedulerStats
from roseinfer.core.promise import Promise
from roseinfer.core.request import sequence_id
from roseinfer.engine.api import StepRecord
from roseinfer.engine.core import IDLE_TURN_WAIT_S, Core
from roseinfer.engine.messages import (
    OWNER,
    Abort,
    Add,
    ClientMessage,
    Disconnected,
    Drain,
    EngineMessage,
    Failed,
    Heartbeat,
    Invalid,
    Outputs,
    Received,
    Shutdown,
    Undrain,
)
from roseinfer.sched.idle_audit import IdleAudit

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
# From one promise to the next at least so many seconds for each request that waits: a policy may look at each of them,
# which takes some .2 us. Routers reckon with what they have sent since the last one.
PROMISE_S = 1e-5


class Inbox(Protocol):
    def receive(self, timeout_s: float) -> list[Received]:
        """All messages that have arrived, with who sent them; waits up to `timeout_s` for the first."""
        ...


class Outbox(Protocol):
    """Neither call waits for a client."""

    def send(self, client: int, message: EngineMessage) -> None: ...

    def broadcast(self, message: EngineMessage, but: int | None = None) -> None:
        """To every client that there is, or to all `but` one."""
        ...


class EngineLoop:
    """Runs until the owner says `Shutdown` or leaves. An idle loop sleeps on its inbox and wakes for heartbeats only.

    A step's outputs go out at once, a message for each client that has some; who is turned away hears of it before the
    step is waited for. `garbage`: collects when the loop has nothing to do (None: the interpreter is not ours to look
    after). `audit`: goes through the books of an idle engine. `publish`: is told the engine's promise of every step
    while that runs (with a long queue now and then), when the engine has become idle, and with every heartbeat.
    """

    def __init__(
        self,
        core: Core,
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
        self._owners: dict[str, int] = {}  # live sequence -> who asked for it
        self._askers: set[int] = set()  # clients that have ever asked for anything
        self._steps: list[StepRecord] = []
        self._last = core.stats()
        self._last_beat_s = 0.0
        self._stopping = False

    def run(self) -> bool:
        """False if an unexpected error ended the loop; it is logged and reported to all clients as `Failed`."""
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # also the accelerator's: out of memory, a failed kernel
            log.exception("the engine loop failed")
            try:
                self._outbox.broadcast(Failed(f"{type(error).__name__}: {error}"[:500], self._core.suspects()))
            finally:
                with contextlib.suppress(Exception):  # an accelerator that failed fails who waits for it to end, too
                    self._core.close()
            return False
        except BaseException:
            self._core.close()
            raise
        self._core.close()
        return True

    def _turn(self) -> None:
        for client, message in self._inbox.receive(self._patience_s()):
            self._handle(client, message)
        if self._stopping:
            return
        # What is placed from now on is not among what we have just read, and so not in this step's promise.
        now_s = self._clock.now()
        if self._core.busy:
            self._step(now_s)
        else:
            self._idle()
        self._beat(now_s)

    def _idle(self) -> None:
        if self._garbage is not None:
            self._garbage.idle()
        if self._audit is not None:
            self._audit.idle()

    def _step(self, now_s: float) -> None:
        """One turn of the core, which begins at `now_s`."""
        outputs = self._core.launch()
        for new, error in self._core.take_invalid():
            self._refuse(new, error)
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
            self._next_promise_s = now_s + PROMISE_S * promise.waiting
            self._publish(promise._replace(draining=True) if self._draining else promise)

    def _send(self, outputs: list[RequestOutput], stats: SchedulerStats) -> None:
        now_s = self._clock.now()
        ended = [output.request_id for output in outputs if output.end is not None]
        if ended and OWNER not in self._askers:
            # Before anybody hears of the end: whoever then looks at what the owner has counted finds all of it.
            self._outbox.send(OWNER, Heartbeat(stats, now_s, self._take_steps(OWNER)))
        for client, own in self._by_client(outputs).items():
            self._outbox.send(client, Outputs(own, stats, now_s, self._take_steps(client)))
        for sequence in ended:
            self._owners.pop(sequence, None)

    def _by_client(self, outputs: list[RequestOutput]) -> dict[int, list[RequestOutput]]:
        if len(self._askers) == 1:
            return dict.fromkeys(self._askers, outputs)
        owners = self._owners
        parts: dict[int, list[RequestOutput]] = {}
        for output in outputs:
            owner = owners.get(output.request_id)
            if owner is not None:  # None: its client has left
                parts.setdefault(owner, []).append(output)
        return parts

    def _take_steps(self, client: int) -> list[StepRecord]:
        if client != OWNER:
            return []
        steps, self._steps = self._steps, []
        return steps

    def _beat(self, read_s: float) -> None:
        """`read_s`: when messages were read."""
        now_s = self._clock.now()
        if now_s - self._last_beat_s < HEARTBEAT_S:
            return
        self._last_beat_s = now_s
        stats = self._core.stats()
        self._outbox.send(OWNER, Heartbeat(stats, now_s, self._take_steps(OWNER)))
        self._outbox.broadcast(Heartbeat(stats, now_s), but=OWNER)
        if not self._core.busy:
            self._promise(read_s)

    def _patience_s(self) -> float:
        if not self._core.busy:
            if self._audit is not None and self._audit.under_way:
                return 0.0
            return max(0.0, self._last_beat_s + HEARTBEAT_S - self._clock.now())
        return IDLE_TURN_WAIT_S if self._core.idle_turn else 0.0

    def _handle(self, client: int, message: ClientMessage | Invalid | Disconnected) -> None:
        if isinstance(message, Add):
            self._add(client, message)
        elif isinstance(message, Abort):
            self._core.abort(message.sequence_ids)
        elif isinstance(message, Invalid):
            self._outbox.send(client, message)
        elif isinstance(message, Disconnected):
            self._leave(client)
        elif client == OWNER:
            self._obey(message)

    def _obey(self, message: ClientMessage) -> None:
        """What its owner alone may tell the engine."""
        if isinstance(message, Shutdown):
            self._stopping = True
        elif isinstance(message, Drain | Undrain):
            self._draining = isinstance(message, Drain)
            self._promise(self._clock.now())

    def _add(self, client: int, message: Add) -> None:
        self._askers.add(client)
        try:
            self._core.add(message)
        except InvalidRequestError as error:
            self._outbox.send(client, Invalid(message.request_id, error.message, error.param, error.code))
            return
        for index in range(message.n):
            if message.outputs is None or message.outputs[index] is not None:
                self._owners[sequence_id(message.request_id, index)] = client

    def _refuse(self, new: Add, error: InvalidRequestError) -> None:
        """A request that the engine had taken is wrong all the same."""
        owners = [self._owners.pop(sequence_id(new.request_id, index), None) for index in range(new.n)]
        client = next((owner for owner in owners if owner is not None), None)
        if client is not None:  # None: it has left
            self._outbox.send(client, Invalid(new.request_id, error.message, error.param, error.code))

    def _leave(self, client: int) -> None:
        """Nobody reads what the client asked for any more. An engine without its owner has no purpose."""
        left = [sequence for sequence, owner in self._owners.items() if owner == client]
        for sequence in left:
            del self._owners[sequence]
        self._core.abort(left)
        self._stopping = self._stopping or client == OWNER


def _record(before: SchedulerStats, now: SchedulerStats, ended_s: float) -> StepRecord:
    """Of the step that was completed in a turn: `before` it, and `now` behind it."""
    # A policy tells the budget of its newest plan. With two steps in flight that of this one is the turn before's.
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
