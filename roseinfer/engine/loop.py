"""The engine's loop: drain the inbox, step, send what came of it."""

import logging
from typing import Protocol

from roseinfer.core.clock import Clock
from roseinfer.core.errors import InvalidRequestError
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import (
    Abort,
    Add,
    ClientMessage,
    EngineMessage,
    Failed,
    Heartbeat,
    Outputs,
    Rejected,
    Shutdown,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
# How long to wait for news when there is work but a policy holds all of it back.
HELD_BACK_S = 0.002


class Inbox(Protocol):
    def receive(self, timeout_s: float) -> list[ClientMessage | Rejected]:
        """All messages that have arrived; waits up to `timeout_s` for the first.

        A request that cannot be read comes as the answer to it.
        """
        ...


class Outbox(Protocol):
    def send(self, message: EngineMessage) -> None: ...


class EngineLoop:
    """Runs until a `Shutdown` message. An idle loop sleeps on its inbox and wakes for the heartbeat only."""

    def __init__(self, core: EngineCore, inbox: Inbox, outbox: Outbox, clock: Clock) -> None:
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._last_sent_s = 0.0
        self._stopping = False
        self._held_back = False

    def run(self) -> bool:
        """True after a `Shutdown`. An unexpected error is logged, reported as `Failed`, and ends the loop: False."""
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            log.exception("the engine loop failed")
            self._outbox.send(Failed(f"{type(error).__name__}: {error}"[:500]))
            return False
        finally:
            self._core.close()
        return True

    def _turn(self) -> None:
        for message in self._inbox.receive(self._patience_s()):
            self._handle(message)
        if self._core.busy and not self._stopping:
            step = self._core.stats().step
            outputs = self._core.step()
            stats = self._core.stats()
            self._held_back = not outputs and stats.step == step
            if not self._held_back:  # also a step without outputs: its numbers belong into the metrics
                self._send(Outputs(outputs, stats, self._clock.now()))
        if self._clock.now() - self._last_sent_s >= HEARTBEAT_S:
            self._send(Heartbeat(self._core.stats(), self._clock.now()))

    def _patience_s(self) -> float:
        if not self._core.busy:
            return HEARTBEAT_S
        return HELD_BACK_S if self._held_back else 0.0

    def _handle(self, message: ClientMessage | Rejected) -> None:
        if isinstance(message, Add):
            try:
                self._core.add(message)
            except InvalidRequestError as error:
                self._send(Rejected(message.request_id, error.message, error.param, error.code))
        elif isinstance(message, Abort):
            self._core.abort(message.sequence_ids)
        elif isinstance(message, Rejected):
            self._send(message)
        elif isinstance(message, Shutdown):
            self._stopping = True

    def _send(self, message: EngineMessage) -> None:
        self._outbox.send(message)
        self._last_sent_s = self._clock.now()
