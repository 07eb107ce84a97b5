"""The engines of a server as one who does not own them sees them: what their keepers say of them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.remote.rolling_restart import rolling_restart
from roseinfer.core.outputs import SchedulerStats
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport, EngineState, StepRecord
from roseinfer.engine.remote.handshake import HandshakeError
from roseinfer.engine.remote.secret import SecretFile
from roseinfer.processes.private_folder import private_folder, remove_folder

log = logging.getLogger("roseinfer.engine.remote")

LOOK_S = 0.05


class RemoteCrew:
    """What `EngineSupervisor` is for engines of one's own: `launch`, then `connect`, then `close`.

    Belongs to one event loop.

    Their keepers start them again, also when asked to, and give them up; so nothing that happens to them ends who has
    this: `failure` is never set. `folder` is removed with it.
    """

    def __init__(self, addresses: Sequence[HostPort], secret: SecretFile, *, quiet_s: float, lost_s: float) -> None:
        """Times as of `RemoteEngines`. Raises `ResourceError` if there is no room for `folder`."""
        self.addresses = list(addresses)
        self.folder = private_folder()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._secret = secret
        self._lost_s = lost_s
        self._engines = RemoteEngines(secret, quiet_s=quiet_s, lost_s=lost_s)
        self._listeners: list[Callable[[int, StepRecord], None]] = []
        self._engines.on_step(self._stepped)
        self._rolling: asyncio.Task[None] | None = None

    async def launch(self) -> None:
        for number, address in enumerate(self.addresses):
            self._engines.add(number, address)

    async def connect(self) -> EngineInfo:
        """Wait until one engine is up, however long that takes. Raises `HandshakeError` if all refuse us."""
        while True:
            for number in range(len(self.addresses)):
                report = self._engines.report(number)
                if report is not None and report.info is not None and report.state is EngineState.READY:
                    return report.info
            self._check_refusals()
            await asyncio.sleep(LOOK_S)

    def _check_refusals(self) -> None:
        refusals = [self._engines.refusal(number) for number in range(len(self.addresses))]
        known = [refusal for refusal in refusals if refusal is not None]
        if known and len(known) == len(refusals):
            raise HandshakeError(f"the engine at {self.addresses[0]} cannot be reached: {known[0]}", known[0].verdict)

    @property
    def engine_addresses(self) -> EngineAddresses:
        secret = self._secret
        return EngineAddresses(list(map(str, self.addresses)), None, secret.now().value, self._lost_s, str(secret.path))

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
        """Have their keepers restart all engines, one after the other, see `rolling_restart`. A call while this is
        under way waits for its end.
        """
        if self._rolling is None or self._rolling.done():
            work = rolling_restart(self.addresses, self._engines, self._secret, lost_s=self._lost_s)
            self._rolling = asyncio.create_task(work)
        else:
            log.info("a rolling restart is under way already")
        await asyncio.wait({self._rolling})

    async def close(self) -> None:
        if self._rolling is not None:
            self._rolling.cancel()
            await asyncio.gather(self._rolling, return_exceptions=True)
        self._engines.close()
        remove_folder(self.folder)
