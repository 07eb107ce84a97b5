"""One process of an engine, from its launch to its end, as its owner sees it."""

import asyncio
from typing import Protocol

from roseinfer.core.clock import Clock
from roseinfer.engine.client import EngineMonitor
from roseinfer.engine.messages import ClientMessage, EngineMessage
from roseinfer.engine.silence import Vitals, vitals
from roseinfer.engine.transport import OnDeath, OnMessage, Transport


class Process(Transport, Protocol):
    """An engine process that this one owns: `ProcessTransport`."""

    @property
    def pid(self) -> int | None: ...

    async def launch(self, on_message: OnMessage, on_death: OnDeath) -> None: ...

    def kill(self) -> None: ...

    def request_stack_dumps(self) -> None:
        """Have it write where its threads are, which `stacks` returns a little later."""
        ...

    def stacks(self) -> str: ...


class Life(EngineMonitor):
    """`signs`: messages from it. `stacks_asked`, `stacks_told`: of a silent one, once."""

    def __init__(self, process: Process, clock: Clock) -> None:
        super().__init__(process, clock)
        self.process = process
        self.ended = asyncio.Event()
        self.signs = 0
        self.killed = False  # which may take it a while
        self.stacks_asked = self.stacks_told = False
        self._began_s = clock.now()

    async def launch(self) -> None:
        await self.process.launch(self._on_message, self._on_death)

    def send(self, message: ClientMessage) -> None:
        self.process.send(message)

    @property
    def age_s(self) -> float:
        return self._clock.now() - self._began_s

    @property
    def death(self) -> str:
        return self._death or "it was stopped"

    def _on_message(self, message: EngineMessage) -> None:
        self.signs += 1
        super()._on_message(message)

    def _on_death(self, reason: str) -> None:
        super()._on_death(reason)
        self.ended.set()


def vitals_of(life: Life) -> Vitals | None:
    """What the system says of its process; None: it has none yet."""
    return None if life.process.pid is None else vitals(life.process.pid)


async def closed(life: Life, *, quiet: bool = False) -> None:
    """Have it end, and wait until it has. `quiet`: it gives no sign of life."""
    try:
        seen = vitals_of(life)
        if quiet or (seen is not None and seen.stopped):  # it would not hear that it is to end
            life.process.kill()
    finally:
        await life.close()
