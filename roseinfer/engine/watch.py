"""What every client knows of its engine, whether it asks anything of it or not."""

import logging
from collections.abc import Callable

from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.outputs import SchedulerStats
from roseinfer.engine.api import EngineHealth, EngineInfo, StepRecord
from roseinfer.engine.messages import EngineMessage, Failed, Heartbeat, Outputs
from roseinfer.engine.transport import Transport

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
