"""Keeping an engine where clients on other hosts reach it."""

import asyncio
import contextlib
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec

from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.messages import StatusUpdate
from roseinfer.cluster.status import EngineStatus
from roseinfer.cluster.supervisor import EngineSupervisor, MakeProcess
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineInfo, EngineReport, EngineState, PortStats, StepRecord
from roseinfer.engine.process_transport import EngineLaunch, EngineProcess, ProcessTransport
from roseinfer.engine.remote.door import door, pass_on
from roseinfer.engine.remote.gate import Gate
from roseinfer.engine.remote.handshake import Greeted, Purpose
from roseinfer.engine.remote.sealed import SealedFrames
from roseinfer.engine.remote.secret import SecretSource

log = logging.getLogger("roseinfer.engine.remote")

# Between looks at whether there is news, and between messages to those who follow even if there is none, in seconds.
LOOK_S, TELL_S = 0.05, 0.5
# Followers that do not read are let go, when so many bytes wait for them.
MAX_UNTOLD_BYTES = 2**20


class EngineKeeper:
    """One engine, see `EngineSupervisor`, and the port by which it is reached: `launch`, then `connect`, then `close`.

    A connection that is let in goes to the engine's process itself, or to the next one while there is none; or it
    follows how the engine does; or it has the engine started anew, as `rolling_restart` does, and ends. Belongs to
    one event loop. `failure` is set to an exception when the engine does not come back.
    """

    def __init__(
        self,
        config: EngineConfig,
        bind: HostPort,
        secret: SecretSource,
        *,
        replicas: ReplicasConfig | None = None,
        stall_s: float = 60.0,
        clock: Clock | None = None,
        make: MakeProcess = ProcessTransport,
    ) -> None:
        """`replicas`: its device and its times; `stall_s`: seconds of silence after which the engine is killed.

        Raises what `EngineSupervisor` raises.
        """
        replicas = replicas or ReplicasConfig()
        assert replicas.count == 1, "a keeper has one engine"
        self._bind = bind
        self._clock = clock or MonotonicClock()
        self._make = make
        self._door: tuple[socket.socket, socket.socket] | None = None
        self._gate = Gate(secret, self._number, self._admit)
        self._supervisor = EngineSupervisor(config, replicas, stall_s=stall_s, clock=clock, make=self._process)
        self._supervisor.on_step(self._stepped)
        self._followers: set[_Follower] = set()
        self._steps: list[StepRecord] = []
        self._telling: asyncio.Task[None] | None = None
        self._told = EngineStatus()
        self._up = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None
        self._draining = False
        self._replace = 0  # the newest process that somebody wants another one for

    @property
    def failure(self) -> "asyncio.Future[None]":
        return self._supervisor.failure

    async def launch(self) -> HostPort:
        """Listen, and start the engine: clients can connect from now on, and wait. Returns the address.

        Raises `ConfigError` if that cannot be used, or if devices or memory do not suffice.
        """
        try:
            address = self._gate.open(self._bind)
            await self._supervisor.launch()
            # Not before: there was nothing yet that they could be told or passed on to.
            self._gate.accept()
            self._telling = asyncio.get_running_loop().create_task(self._tell())
        except BaseException:
            await self.close()
            raise
        return address

    async def connect(self) -> EngineInfo:
        """Wait until the engine is up. Raises what keeps it from starting; nothing is left then."""
        try:
            info = await self._supervisor.connect()
        except BaseException:
            await self.close()
            raise
        self._up.set()
        return info

    def report(self) -> EngineReport:
        return replace(self._supervisor.reports()[0], port_stats=PortStats(len(self._followers), self._gate.refused))

    def promise(self) -> Promise | None:
        """What the engine has promised last; None: nothing."""
        return self._supervisor.promise(0)

    async def drain(self, drain_s: float) -> None:
        """It gets no more requests, and is started anew by nobody. Returns when it has none left, or after `drain_s`
        seconds.
        """
        self._draining = True
        if self._renewing is not None:
            self._renewing.cancel()
        await self._supervisor.drain(drain_s)

    async def rolling_restart(self) -> None:
        """Start the engine anew, when its requests have ended or `drain_timeout` is over."""
        await self._supervisor.rolling_restart()

    async def close(self) -> None:
        """Stop the engine; nothing listens any more."""
        await self._gate.close()
        tasks = [task for task in (self._telling, self._renewing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for follower in list(self._followers):
            follower.close()
        await self._supervisor.close()
        self._close_door()

    # --- the way to the engine's process ------------------------------------------------------------------------
    def _process(self, config: EngineConfig, folder: Path, settings: EngineLaunch) -> EngineProcess:
        """Each process has a door of its own: who has come for one that has ended shall know, and come again."""
        self._close_door()
        self._door = door()
        return self._make(config, folder, replace(settings, door=self._door[1]))

    def _close_door(self) -> None:
        for end in self._door or ():
            end.close()
        self._door = None

    def _number(self) -> int:
        return self._supervisor.status(0).number

    def _admit(self, connection: socket.socket, greeted: Greeted) -> bool:
        if greeted.purpose is Purpose.FOLLOW:
            self._followers.add(_Follower(connection, greeted, self._followers, self._status_update([])))
            return True
        if greeted.purpose is Purpose.RENEW:
            if not self._draining:
                self._renew(connection)
            return not self._draining
        if self._door is None or greeted.number != self._number():
            return False
        passed = pass_on(self._door[0], connection, greeted.keys)
        connection.close()
        return passed

    def _renew(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # it has hung up, having said all that it wanted
            log.info("a server at %s wants the engine to be started anew", connection.getpeername()[0])
        standing = self._supervisor.status(0)
        # One that starts is new. One that is up is not, though it may be what somebody else has asked for just before.
        self._replace = standing.number - (standing.state is EngineState.STARTING)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._roll_when_up())

    async def _roll_when_up(self) -> None:
        await self._up.wait()
        while self._number() <= self._replace:
            await self.rolling_restart()

    # --- telling how it does ------------------------------------------------------------------------------------
    def _stepped(self, engine: int, step: StepRecord) -> None:
        if self._followers:
            self._steps.append(step)

    def _status_update(self, steps: list[StepRecord]) -> StatusUpdate:
        # Promises are the engine's to tell, as of an age: their times here are of this host's clock.
        report = replace(self.report(), promise=None)
        return StatusUpdate(self._supervisor.status(0), report, steps, self._clock.now())

    async def _tell(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            looks += 1
            standing = self._supervisor.status(0)
            if standing == self._told and looks * LOOK_S < TELL_S:
                continue
            looks, self._told = 0, standing
            steps, self._steps = self._steps, []
            if self._followers:
                message = msgspec.msgpack.encode(self._status_update(steps))
                for follower in list(self._followers):
                    follower.tell(message)


class _Follower(asyncio.Protocol):
    """Somebody who wants to know how the engine does, and has nothing to say."""

    def __init__(
        self, connection: socket.socket, greeted: Greeted, followers: "set[_Follower]", first: StatusUpdate
    ) -> None:
        self._frames = SealedFrames(greeted.keys)
        self._followers = followers
        self._first = msgspec.msgpack.encode(first)
        self._transport: asyncio.Transport | None = None
        self._opening = asyncio.get_running_loop().create_task(self._open(connection))

    async def _open(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, connection)
        except OSError:
            connection.close()
            self._followers.discard(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.tell(self._first)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._followers.discard(self)

    def data_received(self, data: bytes) -> None:
        self.close()

    def tell(self, message: bytes) -> None:
        if self._transport is None:
            return
        self._transport.write(self._frames.wrap(message))
        if self._transport.get_write_buffer_size() > MAX_UNTOLD_BYTES:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
