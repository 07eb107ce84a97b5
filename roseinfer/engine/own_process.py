"""An engine in a process of its own, which this one starts, owns and ends: what it is told, and where it lives."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from roseinfer.core import logs
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.stacks import read_stacks, request_stack_dumps
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.messages import ClientMessage, Shutdown
from roseinfer.engine.private import private_folder, remove_folder
from roseinfer.engine.transport import EngineConnection, OnDeath, OnMessage, connect

log = logging.getLogger(__name__)

STOP_PATIENCE_S = 10.0
LAST_WORDS_S = 1.0
BACKLOG = 128
_HIDDEN = ".new"  # of a socket to which its owner has yet to connect


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
        self._link: EngineConnection | None = None
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
            self._link = await connect(hidden, on_message, on_death)
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
            logs.logs_json(),
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

    async def _await_end(self, process: asyncio.subprocess.Process, link: EngineConnection) -> None:
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

    def request_stack_dumps(self) -> None:
        """Have an engine that is up write where its threads are, for `stacks` to read."""
        if self._process is not None and self._process.returncode is None:
            request_stack_dumps(self._place.private, self._place.index, self._process.pid)

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
