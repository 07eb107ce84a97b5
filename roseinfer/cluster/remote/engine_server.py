"""Supervise one engine, and serve it and its status to clients on other hosts."""

import asyncio
import contextlib
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec

from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.handoff import Handoff
from roseinfer.cluster.remote.handshake import Purpose, VerifiedPeer
from roseinfer.cluster.remote.listener import Listener
from roseinfer.cluster.remote.messages import StatusUpdate
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.cluster.status import EngineStatus
from roseinfer.cluster.supervisor import EngineSupervisor, MakeProcess
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineInfo, EngineReport, EngineState, PortStats, StepRecord
from roseinfer.engine.process_transport import EngineLaunch, EngineProcess, PeerBoot, ProcessTransport
from roseinfer.processes.frames import Frames

log = logging.getLogger(__name__)

# Time between checks of the status, and between updates while it stays the same.
CHECK_INTERVAL_S, UPDATE_INTERVAL_S = 0.05, 0.5
# A subscriber that does not read is disconnected when this much waits for it.
MAX_UNSENT_BYTES = 2**20


class RemoteProcessTransport(ProcessTransport):
    """An engine's process that takes connections of other hosts."""

    module = "roseinfer.cluster.remote.engine_process"


class EngineServer:
    """One engine, see `EngineSupervisor`, and its port for clients: `launch`, then `connect`, then `close`.

    A connection is for requests, and goes to the engine's process; or it follows the status; or it has the engine
    restarted. Belongs to one event loop. `failure` is set when the engine does not come back.
    """

    def __init__(
        self,
        config: EngineConfig,
        bind: HostPort,
        tls: TlsFolder,
        *,
        replicas: ReplicasConfig | None = None,
        stall_s: float = 60.0,
        make: MakeProcess = RemoteProcessTransport,
    ) -> None:
        """`replicas`: the engine's device and timeouts. `stall_s`: seconds without a heartbeat until it is killed.

        Raise what `EngineSupervisor` raises.
        """
        replicas = replicas or ReplicasConfig()
        assert replicas.count == 1, "a server has one engine"
        self._bind = bind
        self._tls = tls
        self._clock = MonotonicClock()
        self._make = make
        self._handoff: Handoff | None = None
        self._listener = Listener(tls, self._number, pass_on=self._pass_on, admit=self._admit)
        self._supervisor = EngineSupervisor(config, replicas, stall_s=stall_s, make=self._process)
        self._supervisor.on_step(self._stepped)
        self._subscribers: set[_Subscriber] = set()
        self._steps: list[StepRecord] = []
        self._updating: asyncio.Task[None] | None = None
        self._sent_status = EngineStatus()
        self._up = asyncio.Event()
        self._restarting: asyncio.Task[None] | None = None
        self._draining = False
        self._replaced_number = 0  # the newest process that is to be replaced

    @property
    def failure(self) -> "asyncio.Future[None]":
        return self._supervisor.failure

    async def launch(self) -> HostPort:
        """Listen and start the engine. From now on clients can connect and wait. Return the address.

        Raise `ConfigError` if the address cannot be used, or if devices or memory do not suffice.
        """
        try:
            address = self._listener.open(self._bind)
            await self._supervisor.launch()
            # Not earlier: there was neither a status nor a process to pass connections to.
            self._listener.accept()
            self._updating = asyncio.get_running_loop().create_task(self._send_updates())
        except BaseException:
            await self.close()
            raise
        return address

    async def connect(self) -> EngineInfo:
        """Wait until the engine is up. Raise what keeps it from starting, and leave nothing behind."""
        try:
            info = await self._supervisor.connect()
        except BaseException:
            await self.close()
            raise
        self._up.set()
        return info

    def report(self) -> EngineReport:
        ports = PortStats(len(self._subscribers), self._listener.refused)
        return replace(self._supervisor.reports()[0], port_stats=ports)

    def promise(self) -> Promise | None:
        """Return the engine's last promise, if there is one."""
        return self._supervisor.promise(0)

    async def drain(self, drain_s: float) -> None:
        """Take no more requests, and no more restarts. Return when none is left, or after `drain_s` seconds."""
        self._draining = True
        if self._restarting is not None:
            self._restarting.cancel()
        await self._supervisor.drain(drain_s)

    async def rolling_restart(self) -> None:
        """Restart the engine when its requests have ended or `drain_timeout` is over."""
        await self._supervisor.rolling_restart()

    async def close(self) -> None:
        """Stop the engine, and listen no more."""
        await self._listener.close()
        tasks = [task for task in (self._updating, self._restarting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for subscriber in list(self._subscribers):
            subscriber.close()
        await self._supervisor.close()
        self._close_handoff()

    # --- connections --------------------------------------------------------------------------------------------
    def _process(self, config: EngineConfig, folder: Path, settings: EngineLaunch) -> EngineProcess:
        """Each process has a handoff of its own: clients of a process that has ended notice, and connect again."""
        self._close_handoff()
        self._handoff = Handoff(self._listener.refuse)
        peers = PeerBoot(self._handoff.inside.fileno(), str(self._tls.path), self._number())
        return self._make(config, folder, replace(settings, peers=peers))

    def _close_handoff(self) -> None:
        if self._handoff is not None:
            self._handoff.close()
        self._handoff = None

    def _number(self) -> int:
        return self._supervisor.status(0).number

    def _pass_on(self, connection: socket.socket) -> bool:
        return self._handoff is not None and self._handoff.give(connection)

    def _admit(self, connection: socket.socket, peer: VerifiedPeer) -> bool:
        if peer.purpose is Purpose.STATUS:
            self._subscribers.add(_Subscriber(connection, peer.frames, self._subscribers, self._status_update([])))
            return True
        if not self._draining:
            self._restart(connection)
        return not self._draining

    def _restart(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the client may have closed it already
            log.info("a server at %s asks for a restart of the engine", connection.getpeername()[0])
        status = self._supervisor.status(0)
        # A process that starts is new. One that is up is not, though another server may have asked for it just before.
        self._replaced_number = status.number - (status.state is EngineState.STARTING)
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.get_running_loop().create_task(self._restart_when_up())

    async def _restart_when_up(self) -> None:
        await self._up.wait()
        while self._number() <= self._replaced_number:
            await self.rolling_restart()

    # --- status -------------------------------------------------------------------------------------------------
    def _stepped(self, engine: int, step: StepRecord) -> None:
        if self._subscribers:
            self._steps.append(step)

    def _status_update(self, steps: list[StepRecord]) -> StatusUpdate:
        # The engine sends promises itself, with their age: their times in a report are of this host's clock.
        report = replace(self.report(), promise=None)
        status = self._supervisor.status(0)._replace(pid=0)  # of this host
        return StatusUpdate(status, report, steps, self._clock.now())

    async def _send_updates(self) -> None:
        checks = 0
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            checks += 1
            status = self._supervisor.status(0)
            if status == self._sent_status and checks * CHECK_INTERVAL_S < UPDATE_INTERVAL_S:
                continue
            checks, self._sent_status = 0, status
            steps, self._steps = self._steps, []
            if self._subscribers:
                message = msgspec.msgpack.encode(self._status_update(steps))
                for subscriber in list(self._subscribers):
                    subscriber.send(message)


class _Subscriber(asyncio.Protocol):
    """A client that follows the status. It sends nothing."""

    def __init__(
        self, connection: socket.socket, frames: Frames, subscribers: "set[_Subscriber]", first: StatusUpdate
    ) -> None:
        self._frames = frames
        self._subscribers = subscribers
        self._first = msgspec.msgpack.encode(first)
        self._transport: asyncio.Transport | None = None
        self._opening = asyncio.get_running_loop().create_task(self._open(connection))

    async def _open(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, connection)
        except OSError:
            connection.close()
            self._subscribers.discard(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.send(self._first)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._subscribers.discard(self)

    def data_received(self, data: bytes) -> None:
        self.close()

    def send(self, message: bytes) -> None:
        if self._transport is None:
            return
        self._transport.write(self._frames.wrap(message))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
