"""Transport to an engine in a thread of this process."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from roseinfer.core.clock import MonotonicClock
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import OWNER, ClientMessage, EngineMessage, Received, Shutdown
from roseinfer.engine.transport import OnDeath, OnMessage, settle


class ThreadTransport:
    """Transport to an engine in a thread of this process. `build` is called in that thread.

    `on_death` is never called: the thread ends with its process, and a failed engine sends `Failed`.
    """

    def __init__(self, build: Callable[[], tuple[EngineCore, EngineInfo]]) -> None:
        self._build = build
        self._inbox: queue.SimpleQueue[ClientMessage] = queue.SimpleQueue()
        self._outbox = _LoopOutbox()
        self._thread: threading.Thread | None = None

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        loop = asyncio.get_running_loop()
        self._outbox.open(loop, on_message)
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(loop, ready), name="roseinfer-engine", daemon=True)
        self._thread.start()
        try:
            return await ready
        except BaseException:
            await self.close()
            raise

    def _run(self, loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[EngineInfo]") -> None:
        try:
            core, info = self._build()
        except Exception as error:
            loop.call_soon_threadsafe(settle, ready, error)
            return
        loop.call_soon_threadsafe(settle, ready, info)
        EngineLoop(core, self, self._outbox, MonotonicClock()).run()

    def receive(self, timeout_s: float) -> list[Received]:
        """Return messages for the engine. Called by its thread."""
        received: list[Received] = []
        with contextlib.suppress(queue.Empty):
            received.append((OWNER, self._inbox.get(timeout_s > 0, timeout_s)))
            while True:
                received.append((OWNER, self._inbox.get(False)))
        return received

    def send(self, message: ClientMessage) -> None:
        self._inbox.put(message)

    async def close(self) -> None:
        self.send(Shutdown())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)


class _LoopOutbox:
    """Outbox that passes an engine's messages to the event loop of its only client."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: OnMessage = lambda message: None

    def open(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        self._loop, self._on_message = loop, on_message

    def send(self, client: int, message: EngineMessage) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so no client is left
            self._loop.call_soon_threadsafe(self._on_message, message)

    def greet(self, message: EngineMessage, change: EngineMessage | None = None) -> None:
        self.send(OWNER, change or message)

    def broadcast(self, message: EngineMessage, exclude: int | None = None) -> None:
        if exclude != OWNER:
            self.send(OWNER, message)
