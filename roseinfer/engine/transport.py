"""How a client reaches its engine: a process of its own behind two sockets, or a thread of this process."""

import asyncio
import contextlib
import logging
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from roseinfer.core import errors
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config import EngineConfig
from roseinfer.core.errors import EngineDeadError
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import ClientMessage, EngineMessage, Ready, Rejected, Shutdown, StartFailed

log = logging.getLogger(__name__)

STOP_PATIENCE_S = 10.0
EXIT_PATIENCE_S = 1.0

OnMessage = Callable[[EngineMessage], None]
OnDeath = Callable[[str], None]


class Transport(Protocol):
    """Carries messages to an engine and back. `start` comes first, `close` last."""

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        """Bring the engine up. Both callbacks are called in this event loop; `on_death` at most once.

        Raises the typed error that kept the engine from starting.
        """
        ...

    def send(self, message: ClientMessage) -> None:
        """Never waits."""
        ...

    async def close(self) -> None:
        """Stop the engine and wait until nothing of it is left."""
        ...


class EngineBoot(msgspec.Struct):
    """What an engine process is told on its standard input."""

    config: EngineConfig
    folder: str
    private: str
    inbox: str
    outbox: str
    log_level: str


class ProcessTransport:
    """The engine in its own process, behind two ipc sockets in a private folder."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._private = Path(tempfile.mkdtemp(prefix="roseinfer-"))
        self._context = zmq.Context()
        self._async_context = zmq.asyncio.Context(self._context)
        self._push = self._context.socket(zmq.PUSH)
        self._pull = self._async_context.socket(zmq.PULL)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineMessage).decode
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._on_death: OnDeath = lambda reason: None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._up = False
        self._closing = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        self._on_death = on_death
        self._ready = asyncio.get_running_loop().create_future()
        try:
            await self._launch(on_message)
            info = await self._ready
        except BaseException:
            await self.close()
            raise
        self._up = True
        return info

    async def _launch(self, on_message: OnMessage) -> None:
        boot = EngineBoot(
            self._config,
            str(self._folder),
            str(self._private),
            f"ipc://{self._private / 'to_engine'}",
            f"ipc://{self._private / 'from_engine'}",
            logging.getLevelName(logging.getLogger().getEffectiveLevel()),
        )
        for socket, address in ((self._push, boot.inbox), (self._pull, boot.outbox)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "roseinfer.engine.process", stdin=asyncio.subprocess.PIPE
        )
        assert self._process.stdin is not None
        # The pipe stays open: its end tells the engine that we are gone.
        self._process.stdin.write(msgspec.json.encode(boot) + b"\n")
        self._tasks = [
            asyncio.create_task(self._receive(on_message)),
            asyncio.create_task(self._watch(self._process)),
        ]

    async def _receive(self, on_message: OnMessage) -> None:
        assert self._ready is not None
        while True:
            data = await self._pull.recv()
            try:
                message = self._decode(data)
            except msgspec.MsgspecError as error:
                _settle(self._ready, EngineDeadError(f"the engine says what nobody understands: {error}"))
                self._on_death(f"the engine says what nobody understands: {error}")
                return
            if isinstance(message, Ready):
                _settle(self._ready, message.info)
            elif isinstance(message, StartFailed):
                _settle(self._ready, _start_error(message))
            else:
                on_message(message)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        assert self._ready is not None
        # What it said before it died may still be on its way through the socket.
        await asyncio.sleep(0.05)
        if self._closing:
            return
        reason = f"the engine process ended with code {code}"
        log.error(reason)
        _settle(self._ready, EngineDeadError(reason))
        self._on_death(reason)

    def send(self, message: ClientMessage) -> None:
        """What goes to an engine that has just died is lost; `on_death` is about to say so."""
        with contextlib.suppress(zmq.Again):
            self._push.send(self._encode(message), zmq.NOBLOCK)

    async def close(self) -> None:
        self._closing = True
        process = self._process
        if process is not None and process.returncode is None:
            if self._up:
                self.send(Shutdown())
                await _wait_or_kill(process)
            else:  # it reads no messages while it loads, and there is nothing yet that it could lose
                await _kill(process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if process is not None and process.stdin is not None:
            process.stdin.close()
        self._push.close(0)
        self._pull.close(0)
        self._context.term()
        shutil.rmtree(self._private, ignore_errors=True)


async def _wait_or_kill(process: asyncio.subprocess.Process) -> None:
    """Wait for the engine to stop by itself, the longer for a step that is running, then insist."""
    try:
        await asyncio.wait_for(process.wait(), STOP_PATIENCE_S)
    except TimeoutError:
        log.warning("the engine does not stop by itself: killing it")
        await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _start_error(message: StartFailed) -> Exception:
    kind = getattr(errors, message.error, None) if message.error else None
    if isinstance(kind, type) and issubclass(kind, errors.RoseinferError):
        return kind(message.message)
    return EngineDeadError(f"the engine failed to start: {message.message}")


def _settle(ready: "asyncio.Future[EngineInfo]", outcome: EngineInfo | Exception) -> None:
    """Answer who waits for the start, if anybody still does."""
    if ready.done():
        return
    if isinstance(outcome, Exception):
        ready.set_exception(outcome)
    else:
        ready.set_result(outcome)


class ThreadTransport:
    """The engine in a thread of this process. `build` is called in that thread."""

    def __init__(self, build: Callable[[], tuple[EngineCore, EngineInfo]]) -> None:
        self._build = build
        self._inbox: queue.SimpleQueue[ClientMessage] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: OnMessage = lambda message: None

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="roseinfer-engine", daemon=True)
        self._thread.start()
        try:
            return await ready
        except BaseException:
            await self.close()
            raise

    def _run(self, ready: "asyncio.Future[EngineInfo]") -> None:
        assert self._loop is not None
        try:
            core, info = self._build()
        except Exception as error:
            self._loop.call_soon_threadsafe(_settle, ready, error)
            return
        self._loop.call_soon_threadsafe(_settle, ready, info)
        EngineLoop(core, self, self, MonotonicClock()).run()

    # The engine's side: an inbox and an outbox.
    def receive(self, timeout_s: float) -> list[ClientMessage | Rejected]:
        messages: list[ClientMessage | Rejected] = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._inbox.get(timeout_s > 0, timeout_s))
            while True:
                messages.append(self._inbox.get(False))
        return messages

    def send(self, message: ClientMessage | EngineMessage) -> None:
        """Called by both sides; each has its own kinds of message."""
        if isinstance(message, ClientMessage):
            self._inbox.put(message)
            return
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._on_message, message)

    async def close(self) -> None:
        self.send(Shutdown())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
