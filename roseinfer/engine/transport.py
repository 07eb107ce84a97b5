"""How a client reaches its engine: over a socket to another process, which it may own, or in a thread of this one."""

import asyncio
import contextlib
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import msgspec

from roseinfer.core import errors, logs
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config import EngineConfig
from roseinfer.core.errors import EngineDeadError
from roseinfer.core.stacks import ask_stacks, read_stacks
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import Core
from roseinfer.engine.frames import FrameError, Frames, PlainFrames
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import OWNER, ClientMessage, EngineMessage, Ready, Received, Shutdown, StartFailed
from roseinfer.engine.private import private_folder, remove_folder

log = logging.getLogger(__name__)

STOP_PATIENCE_S = 10.0
LAST_WORDS_S = 1.0
BACKLOG = 128
_HIDDEN = ".new"  # of a socket to which its owner has yet to connect

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
        """Never waits. What goes to an engine that has just died is lost; `on_death` is about to say so."""
        ...

    async def close(self) -> None:
        """Let go of the engine; who owns it stops it and waits until nothing of it is left."""
        ...


class EngineBoot(msgspec.Struct):
    """What an engine process is told on its standard input. `listener`: descriptor of the socket it serves.

    `private`: the folder that it removes if its owner is gone. `board`: where it publishes its promises, as engine
    `index`. `cost_s`: what another engine on such a device has learnt, as in `Promise.cost_s` and `expert_s`. `door`:
    the socket by which connections from other hosts come in (`remote.door`).
    """

    config: EngineConfig
    folder: str
    private: str
    listener: int
    log_level: str
    log_json: bool
    index: int = 0
    board: str | None = None
    cost_s: tuple[float, float, float, float, float] | None = None
    door: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one of several engines of a server lives. `private`: a folder that all of them share, with their sockets.

    `index`: which of them it is. `environment`: what its process finds beside ours. `board`, `cost_s` and `door` as in
    `EngineBoot`.
    """

    private: Path
    index: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    board: Path | None = None
    cost_s: tuple[float, float, float, float, float] | None = None
    door: socket.socket | None = None

    @property
    def address(self) -> Path:
        """The same for each process that the engine has been."""
        return self.private / f"engine{self.index}"


class Link(asyncio.Protocol):
    """The connection to an engine: `ready` is its first word, `lost` its end. `up`: that word was a good one.

    `frames`: how messages are cut. `most_unsent`: bytes that may wait to be sent before the engine counts as gone.
    """

    def __init__(
        self, on_message: OnMessage, on_death: OnDeath, frames: Frames | None = None, most_unsent: float = math.inf
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineInfo] = loop.create_future()
        self.lost = asyncio.Event()
        self.up = False
        self._on_message = on_message
        self._on_death = on_death
        self._frames = frames or PlainFrames()
        self._most_unsent = most_unsent
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineMessage).decode
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        try:
            messages = list(map(self._decode, self._frames.feed(data)))
        except (FrameError, msgspec.MsgspecError) as error:
            self.die(f"the engine says what nobody understands: {error}")
            self.close()
            return
        for message in messages:
            self._take(message)

    def _take(self, message: EngineMessage) -> None:
        if isinstance(message, Ready):
            self.up = True
            self._settle(message.info)
        elif isinstance(message, StartFailed):
            self._settle(_start_error(message))
        else:
            self._on_message(message)

    def die(self, reason: str) -> None:
        self._settle(EngineDeadError(reason))
        self._on_death(reason)

    def _settle(self, outcome: EngineInfo | Exception) -> None:
        _settle(self.ready, outcome)

    def send(self, message: ClientMessage) -> None:
        data = self._encode(message)
        if self._transport is None:
            return
        self._transport.write(self._frames.wrap(data))
        if self._transport.get_write_buffer_size() > self._most_unsent:
            self._transport.abort()  # which is noticed later: who sends is in the middle of something

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class LinkTransport:
    """An engine that another process owns; who inherits it says how to reach that."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._watch: asyncio.Task[None] | None = None

    async def open(self, on_message: OnMessage, on_death: OnDeath) -> Link:
        """Raises `OSError` if nothing is there."""
        raise NotImplementedError

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        try:
            self._link = await self.open(on_message, on_death)
        except OSError as error:
            raise EngineDeadError(f"there is no engine: {error}") from error
        self._watch = asyncio.create_task(self._await_end(self._link))
        return await self._link.ready

    async def _await_end(self, link: Link) -> None:
        await link.lost.wait()
        link.die("the connection to the engine was lost")

    def send(self, message: ClientMessage) -> None:
        assert self._link is not None, "start comes first"
        self._link.send(message)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._link is not None:
            self._link.ready.cancel()
            self._link.close()


class SocketTransport(LinkTransport):
    """An engine of this machine. `address`: the path of its socket."""

    def __init__(self, address: Path) -> None:
        super().__init__()
        self._address = address

    async def open(self, on_message: OnMessage, on_death: OnDeath) -> Link:
        return await _connect(self._address, on_message, on_death)


class ProcessTransport:
    """The engine in a process of its own, which ends with this one. It serves a socket at `address`.

    `place`: where it lives; None: it has a private folder for itself. Others may reach it at `address`, which is
    there from the moment that the engine has its owner.
    """

    module = "roseinfer.engine.process"

    def __init__(self, config: EngineConfig, folder: Path, place: Place | None = None) -> None:
        self._config = config
        self._folder = folder
        self._own_folder = place is None
        self._place = place or Place(private=private_folder())
        self.address = self._place.address
        self._process: asyncio.subprocess.Process | None = None
        self._link: Link | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = self._killed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        try:
            if self._link is None:
                await self.launch(on_message, on_death)
            assert self._link is not None
            return await self._link.ready
        except BaseException:
            await self.close()
            raise

    async def launch(self, on_message: OnMessage, on_death: OnDeath) -> None:
        """The first half of `start`, for who wants others to connect while the engine loads."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # Whoever connects first owns it, so that nobody must find it before we are connected.
            hidden = self.address.with_name(f"{self.address.name}{_HIDDEN}")
            hidden.unlink(missing_ok=True)
            listener.bind(str(hidden))
            listener.listen(BACKLOG)
            self._link = await _connect(hidden, on_message, on_death)
            hidden.rename(self.address)
            self._process = await self._spawn(listener)
        self._watch = asyncio.create_task(self._await_end(self._process, self._link))

    async def _spawn(self, listener: socket.socket) -> asyncio.subprocess.Process:
        place = self._place
        boot = EngineBoot(
            self._config,
            str(self._folder),
            str(place.private),
            listener.fileno(),
            logging.getLevelName(logging.getLogger("roseinfer").getEffectiveLevel()),
            logs.json_is_on(),
            place.index,
            None if place.board is None else str(place.board),
            place.cost_s,
            None if place.door is None else place.door.fileno(),
        )
        inherited = (listener,) if place.door is None else (listener, place.door)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.module,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[each.fileno() for each in inherited],
            env={**os.environ, **place.environment},
        )
        assert process.stdin is not None
        # The pipe stays open: its end tells the engine that we are gone.
        with contextlib.suppress(OSError, RuntimeError):  # it has ended already, as whoever waits for its end will say
            process.stdin.write(msgspec.json.encode(boot) + b"\n")
        return process

    async def _await_end(self, process: asyncio.subprocess.Process, link: Link) -> None:
        code = await process.wait()
        # What it said before it died may still be on its way through the socket.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(link.lost.wait(), LAST_WORDS_S)
        if self._closing:
            return
        reason = f"the engine process ended with code {code}"
        if code == -signal.SIGKILL and not self._killed:
            reason += " (killed, as the system does when memory runs out)"
        if self._own_folder:  # who has given it a place says what follows from it
            log.error(reason)
        link.die(reason)

    def send(self, message: ClientMessage) -> None:
        assert self._link is not None, "start comes first"
        self._link.send(message)

    def ask_stacks(self) -> None:
        """Have an engine that is up write where its threads are, for `stacks` to read."""
        if self._process is not None and self._process.returncode is None:
            ask_stacks(self._place.private, self._place.index, self._process.pid)

    def stacks(self) -> str:
        return read_stacks(self._place.private, self._place.index)

    def kill(self) -> None:
        """For an engine that does nothing any more: it ends, as `on_death` is told."""
        self._killed = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        self._closing = True
        process, link = self._process, self._link
        if process is not None and process.returncode is None:
            if link is not None and link.up:
                link.send(Shutdown())
                await _wait_or_kill(process)
            else:  # it reads no messages while it loads, and there is nothing yet that it could lose
                await _kill(process)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if process is not None and process.stdin is not None:
            process.stdin.close()
        if link is not None:
            link.close()
            link.ready.cancel()
            await link.lost.wait()
        self.address.unlink(missing_ok=True)
        if self._own_folder:
            remove_folder(self._place.private)


async def _connect(address: Path, on_message: OnMessage, on_death: OnDeath) -> Link:
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(lambda: Link(on_message, on_death), os.fspath(address))
    return link


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

    def __init__(self, build: Callable[[], tuple[Core, EngineInfo]]) -> None:
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
            loop.call_soon_threadsafe(_settle, ready, error)
            return
        loop.call_soon_threadsafe(_settle, ready, info)
        EngineLoop(core, self, self._outbox, MonotonicClock()).run()

    def receive(self, timeout_s: float) -> list[Received]:
        """The engine's side."""
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
    """Hands an engine's messages to the event loop of its only client."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: OnMessage = lambda message: None

    def open(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        self._loop, self._on_message = loop, on_message

    def send(self, client: int, message: EngineMessage) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._on_message, message)

    def broadcast(self, message: EngineMessage, but: int | None = None) -> None:
        if but != OWNER:
            self.send(OWNER, message)
