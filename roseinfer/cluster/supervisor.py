"""Supervisor of a server's engines: starts them, watches them, restarts them, stops them."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.cluster.devices import EngineSpec, check_memory, engine_specs, for_restart
from roseinfer.cluster.engine_rows import EngineRows
from roseinfer.cluster.status import EngineStatus
from roseinfer.cluster.supervised_engine import SupervisedEngine, SupervisorTimes
from roseinfer.config.hub import model_folder
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.errors import EngineClosedError, EngineDeadError
from roseinfer.core.promise import Promise
from roseinfer.core.step_cost import StepCost
from roseinfer.engine.api import EngineInfo, EngineReport, StepRecord
from roseinfer.engine.process_transport import EngineLaunch, EngineProcess, ProcessTransport
from roseinfer.processes.private_folder import private_folder, remove_folder
from roseinfer.processes.supervise import BackgroundTasks, rolling_restart

log = logging.getLogger(__name__)

MakeProcess = Callable[[EngineConfig, Path, EngineLaunch], EngineProcess]


class EngineSupervisor:
    """One engine or several, each in a process of its own: `launch`, then `connect`, then `close`.

    An engine that dies, or hangs and is killed for it, is restarted, see `SupervisedEngine`; the others keep serving.
    `addresses`: sockets of the engines, the same across restarts; `rows_path`: their `EngineRows`. `failure` is set to
    an exception when no engine is left that could come back. Belongs to one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        replicas: ReplicasConfig,
        *,
        stall_s: float,
        first: int = 0,
        clock: Clock | None = None,
        make: MakeProcess = ProcessTransport,
        times: SupervisorTimes | None = None,
    ) -> None:
        """`stall_s`: seconds without a heartbeat after which an engine is killed. `first`: number of the first engine.

        Raises `ResourceError` if there is no room for `folder`, and the errors of `hub.model_folder`.
        """
        self._config = config
        self._replicas = replicas
        self._first = first
        self._clock = clock or MonotonicClock()
        self._make = make
        self._times = replace(
            times or SupervisorTimes(),
            late_s=replicas.engine_timeout,
            timeout_s=stall_s,
            drain_timeout_s=replicas.drain_timeout,
        )
        self._model = model_folder(config.model)
        self.folder = private_folder()
        self.rows_path = self.folder / "rows"
        try:
            self._rows = EngineRows.create(self.rows_path, first + replicas.count)
        except BaseException:
            remove_folder(self.folder)
            raise
        numbers = range(first, first + replicas.count)
        self.addresses = [EngineLaunch(folder=self.folder, index=number).address for number in numbers]
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engines: list[SupervisedEngine] = []
        self._step_listeners: list[Callable[[int, StepRecord], None]] = []
        self._tasks = BackgroundTasks(self._on_task_failure)
        self._rolling: asyncio.Task[None] | None = None
        self._up = self._closed = False

    async def launch(self) -> None:
        """Launch all processes; clients can connect afterwards and wait.

        The engines load at the same time, so the pages of a checkpoint are read once for all of them. Raises
        `ConfigError` if devices or memory do not suffice.
        """
        try:
            specs = await asyncio.to_thread(self._specs)
        except BaseException:
            await self.close()
            raise
        self._engines = [
            SupervisedEngine(index, spec, self._rows, self, self._clock, self._times)
            for index, spec in enumerate(specs, self._first)
        ]
        for engine in self._engines:
            self._tasks.spawn(engine.run())
        self._tasks.spawn(self._watch())
        for engine in self._engines:
            await engine.launched.wait()

    async def connect(self) -> EngineInfo:
        """Wait until all engines are up. Return the info of one, with the least of what differs between them.

        Raises the error that keeps one of them from starting; all are stopped then. The folder stays until `close`,
        since other processes may still open its files.
        """
        try:
            infos = await asyncio.gather(*(asyncio.shield(engine.first) for engine in self._engines))
        except BaseException:
            await self._stop()
            raise
        self._up = True
        facts = replace(
            infos[0].facts,
            max_model_len=min(info.facts.max_model_len for info in infos),
            num_blocks=min(info.facts.num_blocks for info in infos),
        )
        return replace(infos[0], facts=facts)

    @property
    def engine_addresses(self) -> EngineAddresses:
        return EngineAddresses(list(map(str, self.addresses)), str(self.rows_path), first=self._first)

    def reports(self) -> list[EngineReport]:
        """Return a report of each engine. Counters continue across restarts."""
        return [engine.report() for engine in self._engines]

    def status(self, engine: int) -> EngineStatus:
        return self._rows.status(engine)

    def promise(self, engine: int) -> Promise | None:
        """Return the newest promise; None if there is none."""
        return self._rows.promise(engine)

    def on_step(self, listener: Callable[[int, StepRecord], None]) -> None:
        """Call `listener` with an engine's index for each of its steps, within half a second."""
        self._step_listeners.append(listener)

    def check(self) -> None:
        """Check the heartbeats of all engines, as this does by itself every `check_interval_s` seconds."""
        for engine in self._engines:
            engine.check()

    async def rolling_restart(self) -> None:
        """Restart all engines, one after the other, each when the one before has settled.

        An engine gets no more requests and may finish its own for `drain_timeout` seconds. With one engine, requests
        are rejected meanwhile. A call during a rolling restart waits for its end.
        """
        if not self._up or self._closed:
            log.warning("no rolling restart: not all engines are up")
            return
        if self._rolling is None or self._rolling.done():
            self._rolling = self._tasks.spawn(rolling_restart(self._engines, log, poll_s=self._times.poll_s))
        else:
            log.info("a rolling restart is in progress already")
        await asyncio.wait({self._rolling})

    async def drain(self, timeout_s: float) -> None:
        """Give no engine more requests. Return when none is left, or after `timeout_s` seconds."""
        await asyncio.gather(*(engine.drain(timeout_s) for engine in self._engines))

    async def close(self) -> None:
        """Stop all engines and wait until nothing of them is left."""
        await self._stop()
        self._rows.close()
        remove_folder(self.folder)

    async def _stop(self) -> None:
        self._closed = True
        await self._tasks.cancel()
        for engine in self._engines:
            engine.fail_first(EngineClosedError("the engine was closed"))

    def _specs(self) -> list[EngineSpec]:
        specs = engine_specs(self._config, self._replicas)
        check_memory(specs, self._model)
        return specs

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._times.check_interval_s)
            self.check()

    # --- from the engines ---------------------------------------------------------------------------------------
    def make_process(self, engine: SupervisedEngine, number: int) -> EngineProcess:
        settings = EngineLaunch(
            folder=self.folder,
            index=engine.index,
            environment=engine.spec.environment,
            rows=self.rows_path,
            costs=self._costs_for(engine),
        )
        return self._make(for_restart(engine.spec.config, number), self._model, settings)

    def _costs_for(self, engine: SupervisedEngine) -> StepCost | None:
        """Return what the engine has learnt itself, else what another one has on such a device."""
        alike = (other for other in self._engines if other.spec.kind == engine.spec.kind)
        return next((one.learnt for one in (engine, *alike) if one.learnt is not None), None)

    def on_engine_step(self, index: int, step: StepRecord) -> None:
        for listener in self._step_listeners:
            listener(index, step)

    def on_given_up(self, engine: SupervisedEngine) -> None:
        if all(other.given_up for other in self._engines):
            dead = "the engine has" if len(self._engines) == 1 else "all engines have"
            self._fail(EngineDeadError(f"{dead} died too often; last error: {engine.report().health.error}"))

    def _on_task_failure(self, error: BaseException) -> None:
        log.error("the engine supervisor failed", exc_info=error)
        self._fail(error)
        for engine in self._engines:
            engine.fail_first(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()  # retrieved: at the end of a server perhaps no caller waits
