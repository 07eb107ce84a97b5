"""An engine in a process of its own, which this process launches, owns and ends."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.promise import Promise
from roseinfer.core.stacks import read_stacks, request_stack_dumps
from roseinfer.core.step_cost import StepCost
from roseinfer.engine.api import EngineInfo, EngineState
from roseinfer.engine.messages import ClientMessage, Shutdown
from roseinfer.engine.transport import EngineConnection, OnDeath, OnMessage, Transport, connect
from roseinfer.processes.child import LogSettings
from roseinfer.processes.heartbeat import ProcessStats, process_stats
from roseinfer.processes.launch import ChildProcess, describe_exit, launch
from roseinfer.processes.private_folder import private_folder, remove_folder
from roseinfer.processes.shared_rows import RowLayout
from roseinfer.processes.supervise import finish

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
LAST_MESSAGES_TIMEOUT_S = 1.0
MAX_PENDING_CONNECTIONS = 128
_HIDDEN = ".new"  # suffix of a socket to which its owner has yet to connect

# Shared row of an engine: its newest promise, which it writes itself, and words for its owner (`cluster.engine_rows`).
ENGINE_ROWS = RowLayout(words=2, record=Promise(0.0), tag=" ".join(EngineState))


class PeerBoot(msgspec.Struct, frozen=True):
    """Settings of an engine process that takes connections of other hosts.

    `handoff`: descriptor by which they arrive. `tls_dir`: folder of its certificates. `number`: of the process, see
    `EngineStatus`.
    """

    handoff: int
    tls_dir: str
    number: int


class EngineBoot(msgspec.Struct):
    """Boot struct of an engine process.

    `listener`: descriptor of its socket. `folder`: removed by the engine if its owner has gone. `rows`: file
    of shared rows; the engine writes its promises to row `index`. `costs`: from another engine on such a device.
    `peers`: of an engine that takes connections of other hosts.
    """

    config: EngineConfig
    model_folder: str
    folder: str
    listener: int
    log: LogSettings
    index: int = 0
    rows: str | None = None
    costs: StepCost | None = None
    peers: PeerBoot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """Settings that distinguish one of several engines of a server.

    `folder`: private folder that all of them share, with their sockets. `environment`: additions to ours. `rows`,
    `costs` and `peers` as in `EngineBoot`.
    """

    folder: Path
    index: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    rows: Path | None = None
    costs: StepCost | None = None
    peers: PeerBoot | None = None

    @property
    def address(self) -> Path:
        """Return the path of the engine's socket, the same for each process that it is restarted in."""
        return self.folder / f"engine{self.index}"


class EngineProcess(Transport, Protocol):
    """A transport to an engine process that this one owns."""

    @property
    def pid(self) -> int | None: ...

    async def launch(self, on_message: OnMessage, on_death: OnDeath) -> None:
        """Do the first half of `start`: clients can connect afterwards, while the engine loads. Raises `OSError`."""
        ...

    def kill(self) -> None:
        """End an engine that does not respond; `on_death` is called."""
        ...

    def stats(self) -> ProcessStats | None: ...

    def request_stack_dumps(self) -> None:
        """Have an engine that runs write the stacks of its threads, for `stacks` to read a little later."""
        ...

    def stacks(self) -> str: ...


class ProcessTransport:
    """The transport to an engine process, which ends with this one and serves a Unix socket at `address`.

    `settings`: None = the engine has a private folder of its own.
    """

    module = "roseinfer.engine.process"

    def __init__(self, config: EngineConfig, model_folder: Path, settings: EngineLaunch | None = None) -> None:
        self._config = config
        self._model_folder = model_folder
        self._owns_folder = settings is None
        self._settings = settings or EngineLaunch(folder=private_folder())
        self.address = self._settings.address
        self._child: ChildProcess | None = None
        self._link: EngineConnection | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = self._killed = False

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        try:
            if self._link is None:
                await self.launch(on_message, on_death)
            assert self._link is not None
            return await self._link.ready
        except BaseException:
            await finish(self.close())
            raise

    async def launch(self, on_message: OnMessage, on_death: OnDeath) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # The first connection owns the engine, so no other client may find the socket before ours connects.
            hidden = self.address.with_name(f"{self.address.name}{_HIDDEN}")
            hidden.unlink(missing_ok=True)
            listener.bind(str(hidden))
            listener.listen(MAX_PENDING_CONNECTIONS)
            self._link = await connect(hidden, on_message, on_death)
            hidden.rename(self.address)
            self._child = self._launch_child(listener)
        self._watch = asyncio.create_task(self._await_end(self._child, self._link))

    def _launch_child(self, listener: socket.socket) -> ChildProcess:
        settings = self._settings
        boot = EngineBoot(
            config=self._config,
            model_folder=str(self._model_folder),
            folder=str(settings.folder),
            listener=listener.fileno(),
            log=LogSettings.current(),
            index=settings.index,
            rows=None if settings.rows is None else str(settings.rows),
            costs=settings.costs,
            peers=settings.peers,
        )
        inherited = [boot.listener] if boot.peers is None else [boot.listener, boot.peers.handoff]
        return launch(self.module, boot, pass_fds=inherited, environment=settings.environment)

    async def _await_end(self, child: ChildProcess, link: EngineConnection) -> None:
        code = await child.wait()
        # Messages that it sent before it died may still be in the socket.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(link.lost.wait(), LAST_MESSAGES_TIMEOUT_S)
        if self._closing:
            return
        reason = f"the engine process {describe_exit(code, by_us=self._killed)}"
        if self._owns_folder:  # otherwise a supervisor logs it, with what follows
            log.error(reason)
        link.fail(reason)

    def send(self, message: ClientMessage) -> None:
        assert self._link is not None, "start comes first"
        self._link.send(message)

    def stats(self) -> ProcessStats | None:
        return None if self._child is None else process_stats(self._child.pid)

    def request_stack_dumps(self) -> None:
        if self._child is not None and self._child.exit_code is None:
            request_stack_dumps(self._settings.folder, self._settings.index, self._child.pid)

    def stacks(self) -> str:
        return read_stacks(self._settings.folder, self._settings.index)

    def kill(self) -> None:
        self._killed = True
        if self._child is not None:
            self._child.kill()

    async def close(self) -> None:
        self._closing = True
        child, link = self._child, self._link
        if child is not None:
            timeout_s = 0.0  # while it loads it reads no messages, and has nothing to lose
            if link is not None and link.up:
                link.send(Shutdown())
                timeout_s = STOP_TIMEOUT_S
            await child.stop(timeout_s)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if child is not None:
            child.close()
        if link is not None:
            link.close()
            link.ready.cancel()
            await link.lost.wait()
        self.address.unlink(missing_ok=True)
        if self._owns_folder:
            remove_folder(self._settings.folder)
