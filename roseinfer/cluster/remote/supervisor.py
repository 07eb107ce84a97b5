"""The engines of a server that other hosts own, with the interface of `EngineSupervisor`."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.remote.handshake import HandshakeError
from roseinfer.cluster.remote.rolling_restart import ask_to_restart, rolling_restart
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.core.outputs import SchedulerStats
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport, EngineState, StepRecord
from roseinfer.processes.private_folder import private_folder, remove_folder

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.05


class RemoteSupervisor:
    """Engines that their own hosts supervise: `launch`, then `connect`, then `close`. Belongs to one event loop.

    Their hosts restart them and give them up. So `failure` is never set. `close` removes `folder`.
    """

    def __init__(self, addresses: Sequence[HostPort], tls: TlsFolder, *, quiet_s: float, lost_s: float) -> None:
        """For the times see `RemoteEngines`. Raise `ResourceError` if there is no room for `folder`."""
        self.addresses = list(addresses)
        self.folder = private_folder()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tls = tls
        self._lost_s = lost_s
        self._engines = RemoteEngines(tls, quiet_s=quiet_s, lost_s=lost_s)
        self._listeners: list[Callable[[int, StepRecord], None]] = []
        self._engines.on_step(self._stepped)
        self._rolling: asyncio.Task[None] | None = None

    async def launch(self) -> None:
        for number, address in enumerate(self.addresses):
            self._engines.add(number, address)

    async def connect(self) -> EngineInfo:
        """Wait until one engine is up, however long that takes. Raise `HandshakeError` if all reject us."""
        while True:
            for number in range(len(self.addresses)):
                report = self._engines.report(number)
                if report is not None and report.info is not None and report.state is EngineState.READY:
                    return report.info
            self._check_refusals()
            await asyncio.sleep(CHECK_INTERVAL_S)

    def _check_refusals(self) -> None:
        refusals = [self._engines.refusal(number) for number in range(len(self.addresses))]
        known = [refusal for refusal in refusals if refusal is not None]
        if known and len(known) == len(refusals):
            raise HandshakeError(f"cannot reach the engine at {self.addresses[0]}: {known[0]}", known[0].refusal)

    @property
    def engine_addresses(self) -> EngineAddresses:
        return EngineAddresses(list(map(str, self.addresses)), None, self._lost_s, str(self._tls.path))

    def reports(self) -> list[EngineReport]:
        return [self._report(number) for number in range(len(self.addresses))]

    def _report(self, number: int) -> EngineReport:
        state, report = self._engines.status(number).state, self._engines.report(number)
        if report is None:
            health = EngineHealth(False, 0.0, "its host has not answered yet")
            return EngineReport(number, state, health, SchedulerStats())
        if state is EngineState.DEAD and report.health.alive:
            lost = replace(report.health, alive=False, error="its host does not answer")
            report = replace(report, health=lost)
        return replace(report, engine=number, state=state)

    def on_step(self, listener: Callable[[int, StepRecord], None]) -> None:
        """Have `listener` called with an engine's number for each of its steps, within half a second."""
        self._listeners.append(listener)

    def _stepped(self, number: int, step: StepRecord) -> None:
        for listener in self._listeners:
            listener(number, step)

    async def rolling_restart(self) -> None:
        """Restart all engines one after the other, see `rolling_restart`. During one, wait for its end instead."""
        if self._rolling is None or self._rolling.done():
            ask = partial(ask_to_restart, self._tls)
            work = rolling_restart(self.addresses, self._engines, ask, lost_s=self._lost_s)
            self._rolling = asyncio.create_task(work)
        else:
            log.info("a rolling restart is in progress already")
        await asyncio.wait({self._rolling})

    async def close(self) -> None:
        if self._rolling is not None:
            self._rolling.cancel()
            await asyncio.gather(self._rolling, return_exceptions=True)
        self._engines.close()
        remove_folder(self.folder)
