"""Engines on other hosts, as a process that sends them requests knows them."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from roseinfer.cluster.endpoint import Connector
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.handshake import HandshakeError
from roseinfer.cluster.remote.messages import StatusUpdate
from roseinfer.cluster.remote.subscription import StatusSubscription
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.cluster.remote.transport import TlsTransport
from roseinfer.cluster.status import EngineStatus
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineReport, EngineState, StepRecord
from roseinfer.processes.heartbeat import CHECK_INTERVAL_S, MIN_LATE_S

log = logging.getLogger(__name__)

OnStep = Callable[[int, StepRecord], None]


class RemoteEngines:
    """A `StatusReader` of engines that come and go, and the transports to them. Belongs to one event loop.

    `add` follows an engine's status from then on, whether its host is there or not. If nothing comes from an engine for
    `quiet_s` seconds, over its own connection or that of its status, it is quiet: its host or the network is lost.
    After `lost_s` seconds its connection is given up. Time is counted in checks, see `processes.heartbeat`.
    """

    def __init__(
        self,
        tls: TlsFolder,
        *,
        quiet_s: float,
        lost_s: float,
        clock: Clock | None = None,
        log_failures: bool = True,
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        """`log_failures`: log which engines cannot be reached; False if another process that follows them does.

        `check_interval_s`: seconds between two checks; the timeouts count checks of `CHECK_INTERVAL_S`.
        """
        self._tls = tls
        self.level = logging.WARNING if log_failures else logging.DEBUG
        self._quiet_checks = round(max(quiet_s, MIN_LATE_S) / CHECK_INTERVAL_S)
        self._lost_checks = max(self._quiet_checks, round(lost_s / CHECK_INTERVAL_S))
        self._check_interval_s = check_interval_s
        self.clock = clock or MonotonicClock()
        self._engines: dict[int, _RemoteEngine] = {}
        self._on_step: OnStep = lambda number, step: None
        self._checking: asyncio.Task[None] | None = None

    def add(self, number: int, address: HostPort, server_name: str | None = None) -> None:
        """Follow an engine. `number`: one that no engine has had. `server_name`: what its certificate must name; None:
        the host.
        """
        assert number not in self._engines
        self._engines[number] = _RemoteEngine(number, address, server_name, self._tls, self)
        if self._checking is None:
            self._checking = asyncio.get_running_loop().create_task(self._check_forever())

    def connector(self, number: int, address: HostPort, server_name: str | None = None) -> Connector:
        """Do the same for a `RoutedEngine`."""
        self.add(number, address, server_name)
        return Connector(partial(self.transport, number), self, partial(self.forget, number))

    def forget(self, number: int) -> None:
        """Stop following an engine; from now on it appears as one that was never there."""
        engine = self._engines.pop(number, None)
        if engine is not None:
            engine.end()
        if not self._engines and self._checking is not None:
            self._checking.cancel()
            self._checking = None

    def transport(self, number: int) -> TlsTransport:
        return self._engines[number].new_transport()

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
        return remote.status(silent=remote.missed_checks >= self._quiet_checks)

    def report(self, engine: int) -> EngineReport | None:
        """Return its last report; None if there was none yet."""
        remote = self._engines.get(engine)
        return None if remote is None or remote.update is None else remote.update.report

    def refusal(self, engine: int) -> HandshakeError | None:
        """Return why the last handshake with it failed, if it did."""
        remote = self._engines.get(engine)
        return None if remote is None else remote.refusal

    # --- heartbeats --------------------------------------------------------------------------------------------------
    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(self._check_interval_s)
            self.check_silence()

    def check_silence(self) -> None:
        """Count one check without a message for each engine, and give up those that were silent for too long."""
        for engine in list(self._engines.values()):
            engine.check_silence(self._lost_checks)

    def close(self) -> None:
        for number in list(self._engines):
            self.forget(number)


class _RemoteEngine:
    """State of one engine. `missed_checks`: checks since the last message."""

    def __init__(
        self, number: int, address: HostPort, server_name: str | None, tls: TlsFolder, engines: RemoteEngines
    ) -> None:
        self.number = number
        self.written = 0
        self.promise: Promise | None = None
        self.update: StatusUpdate | None = None
        self.refusal: HandshakeError | None = None
        self.missed_checks = 0
        self._address = address
        self._all = engines
        self._process = 0  # to which the newest connection leads
        self._new_transport = partial(TlsTransport, address, tls, self, server_name)
        self._transport: TlsTransport | None = None
        self._subscription = StatusSubscription(address, tls, server_name, self)

    def new_transport(self) -> TlsTransport:
        return self._new_transport()

    def end(self) -> None:
        self._subscription.close()
        self._transport = None

    def status(self, *, silent: bool) -> EngineStatus:
        if self.update is None:
            return EngineStatus(EngineState.STARTING, self._process)
        status = self.update.status
        status = status._replace(number=max(status.number, self._process))
        if not self._subscription.connected:
            return status._replace(state=EngineState.DEAD, host_lost=True)
        if silent and status.state in (EngineState.READY, EngineState.DRAINING, EngineState.QUIET):
            return status._replace(state=EngineState.QUIET, host_lost=True)
        return status

    def check_silence(self, lost_checks: int) -> None:
        self.missed_checks += 1
        if self.missed_checks != lost_checks:
            return
        reason = f"no heartbeat from the engine at {self._address} for {self.missed_checks * CHECK_INTERVAL_S:g} s"
        if self._transport is not None:
            self._transport.cut(reason)
        self._subscription.cut(reason)

    # --- from the connection to its status ----------------------------------------------------------------------
    def updated(self, update: StatusUpdate) -> None:
        self.missed_checks = 0
        self.refusal = None
        self.update = update
        shift_s = self._all.clock.now() - update.now_s
        for step in update.steps:
            self._all.stepped(self.number, step._replace(ended_s=step.ended_s + shift_s))

    def refused(self, error: HandshakeError) -> None:
        if self.refusal is None or str(self.refusal) != str(error):
            log.log(self._all.level, "cannot reach the engine at %s: %s", self._address, error)
        self.refusal = error

    def unreachable(self, reason: str) -> None:
        log.log(self._all.level, "cannot reach the engine at %s: %s", self._address, reason)

    # --- from the connection to the engine ----------------------------------------------------------------------
    def connected(self, transport: TlsTransport, number: int) -> None:
        self._transport = transport
        if number != self._process:  # promises of the previous process are void
            self._process, self.promise = number, None
            self.written += 1

    def promised(self, promise: Promise, age_s: float) -> None:
        self.missed_checks = 0
        self.promise = promise._replace(at_s=self._all.clock.now() - age_s)
        self.written += 1
