"""Engines on other hosts, as a process that sends them requests knows them."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from roseinfer.cluster.endpoint import Connector
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.messages import StatusUpdate
from roseinfer.cluster.remote.subscription import Follower
from roseinfer.cluster.status import EngineStatus
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineReport, EngineState, StepRecord
from roseinfer.engine.remote.handshake import HandshakeError
from roseinfer.engine.remote.secret import SecretSource
from roseinfer.engine.remote.transport import TcpTransport
from roseinfer.processes.heartbeat import CHECK_INTERVAL_S, MIN_LATE_S

log = logging.getLogger("roseinfer.engine.remote")

OnStep = Callable[[int, StepRecord], None]


class RemoteEngines:
    """A `StatusReader` of engines that come and go, and the ways to them. Belongs to one event loop.

    `add` follows an engine's keeper from then on, be it there or not. An engine of which nothing is heard for `quiet_s`
    seconds, neither by its own connection nor by its keeper's, is quiet: its host, or the network, is gone. After
    `lost_s` seconds its connection is given up. Silence is counted in looks, see `processes.heartbeat`.
    """

    def __init__(
        self,
        secret: SecretSource,
        *,
        quiet_s: float,
        lost_s: float,
        clock: Clock | None = None,
        log_failures: bool = True,
    ) -> None:
        """`tells`: in the log which engines cannot be reached; False: somebody else does, who follows them too."""
        self._secret = secret
        self.level = logging.WARNING if log_failures else logging.DEBUG
        self._quiet_looks = round(max(quiet_s, MIN_LATE_S) / CHECK_INTERVAL_S)
        self._lost_looks = max(self._quiet_looks, round(lost_s / CHECK_INTERVAL_S))
        self.clock = clock or MonotonicClock()
        self._engines: dict[int, _Remote] = {}
        self._on_step: OnStep = lambda number, step: None
        self._looking: asyncio.Task[None] | None = None

    def add(self, number: int, address: HostPort, secret: SecretSource | None = None) -> None:
        """`number`: one that no engine has had. `secret`: its own; None: that of all."""
        assert number not in self._engines
        self._engines[number] = _Remote(number, address, secret or self._secret, self)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_on())

    def connector(self, number: int, address: HostPort, secret: SecretSource | None = None) -> Connector:
        """The same, for a `RoutedEngine`."""
        self.add(number, address, secret)
        return Connector(partial(self.transport, number), self, partial(self.forget, number))

    def forget(self, number: int) -> None:
        """Nothing of it is heard any more; what is asked of it is answered as for one that was never there."""
        remote = self._engines.pop(number, None)
        if remote is not None:
            remote.end()
        if not self._engines and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def transport(self, number: int) -> TcpTransport:
        """A new way to it."""
        remote = self._engines[number]
        return TcpTransport(remote.address, remote.secret, remote)

    def on_step(self, listener: OnStep) -> None:
        """Have `listener` called with an engine's number for each of its steps, within half a second."""
        self._on_step = listener

    def stepped(self, number: int, step: StepRecord) -> None:
        self._on_step(number, step)

    # --- what is known of them, see `StatusReader` ---------------------------------------------------------------
    def write_count(self, engine: int) -> int:
        remote = self._engines.get(engine)
        return 0 if remote is None else remote.written

    def promise(self, engine: int) -> Promise | None:
        remote = self._engines.get(engine)
        return None if remote is None else remote.promise

    def status(self, engine: int) -> EngineStatus:
        remote = self._engines.get(engine)
        if remote is None:
            return EngineStatus(EngineState.DEAD)
        return remote.status(silent=remote.looks >= self._quiet_looks)

    def report(self, engine: int) -> EngineReport | None:
        """What its keeper said last; None: nothing yet."""
        remote = self._engines.get(engine)
        return None if remote is None or remote.update is None else remote.update.report

    def refusal(self, engine: int) -> HandshakeError | None:
        """Why the last attempt to reach it was refused, if it was."""
        remote = self._engines.get(engine)
        return None if remote is None else remote.refusal

    # --- silence --------------------------------------------------------------------------------------------------
    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for remote in list(self._engines.values()):
                remote.look(self._lost_looks)

    def close(self) -> None:
        for number in list(self._engines):
            self.forget(number)


class _Remote:
    """What has been heard of one engine. `looks`: how often it was looked at since the last sign of life."""

    def __init__(self, number: int, address: HostPort, secret: SecretSource, engines: RemoteEngines) -> None:
        self.number = number
        self.address = address
        self.secret = secret
        self.written = 0
        self.promise: Promise | None = None
        self.update: StatusUpdate | None = None
        self.refusal: HandshakeError | None = None
        self.looks = 0
        self._all = engines
        self._process = 0  # to which the newest connection leads
        self._way: TcpTransport | None = None
        self._follower = Follower(address, secret, self)

    def end(self) -> None:
        self._follower.close()
        self._way = None

    def status(self, *, silent: bool) -> EngineStatus:
        if self.update is None:
            return EngineStatus(EngineState.STARTING, self._process)
        said = self.update.status
        status = said._replace(number=max(said.number, self._process))
        if not self._follower.connected:
            return status._replace(state=EngineState.DEAD, host_lost=True)
        if silent and status.state in (EngineState.READY, EngineState.DRAINING, EngineState.QUIET):
            return status._replace(state=EngineState.QUIET, host_lost=True)
        return status

    def look(self, lost_looks: int) -> None:
        self.looks += 1
        if self.looks != lost_looks:
            return
        reason = f"nothing was heard of the engine at {self.address} for {self.looks * CHECK_INTERVAL_S:g} s"
        if self._way is not None:
            self._way.cut(reason)
        self._follower.cut(reason)

    # --- by the connection to its keeper ------------------------------------------------------------------------
    def told(self, update: StatusUpdate) -> None:
        self.looks = 0
        self.refusal = None
        self.update = update
        shift_s = self._all.clock.now() - update.now_s
        for step in update.steps:
            self._all.stepped(self.number, step._replace(ended_s=step.ended_s + shift_s))

    def refused(self, error: HandshakeError) -> None:
        if self.refusal is None or str(self.refusal) != str(error):
            log.log(self._all.level, "the engine at %s cannot be reached: %s", self.address, error)
        self.refusal = error

    def unreachable(self, reason: str) -> None:
        log.log(self._all.level, "the engine at %s cannot be reached: %s", self.address, reason)

    # --- by the connection to the engine ------------------------------------------------------------------------
    def connected(self, transport: TcpTransport, number: int) -> None:
        self._way = transport
        if number != self._process:  # what the process before has promised is void
            self._process, self.promise = number, None
            self.written += 1

    def promised(self, promise: Promise, age_s: float) -> None:
        self.looks = 0
        self.promise = promise._replace(at_s=self._all.clock.now() - age_s)
        self.written += 1
