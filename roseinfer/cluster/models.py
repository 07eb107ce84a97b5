"""Supervisors of a server's models, one for each, as one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from roseinfer.cluster.start import Supervisor, engine_supervisor
from roseinfer.core.config.models import ServedModelConfig
from roseinfer.core.errors import EngineClosedError, RoseinferError
from roseinfer.engine.api import EngineInfo, EngineReport, StepRecord
from roseinfer.processes.private_folder import remove_folder

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class ModelSupervisors:
    """Owner of the engines of all models: `launch` and `connect` for each model, then `close`.

    `failure` is set to an exception when no model has an engine left that could come back. Until then, the failure of a
    model's last engine is only logged. Belongs to one event loop.
    """

    def __init__(self, models: Sequence[ServedModelConfig], supervisors: Sequence[Supervisor]) -> None:
        self.models = tuple(models)
        self.supervisors = tuple(supervisors)
        self.folder = supervisors[0].folder
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for model, supervisor in zip(models, supervisors, strict=True):
            supervisor.failure.add_done_callback(partial(self._on_failure, model))

    @classmethod
    def of(cls, models: Sequence[ServedModelConfig]) -> "ModelSupervisors":
        """Make the supervisors. Raises as `engine_supervisor`; then no folder of the others is left."""
        made: list[Supervisor] = []
        try:
            for model in models:
                stall_s = model.server.stall_timeout
                made.append(engine_supervisor(model.engine, model.replicas, stall_s, model.first_engine))
        except BaseException:
            for supervisor in made:
                remove_folder(supervisor.folder)
            raise
        return cls(models, made)

    async def launch(self, index: int) -> None:
        """Launch the engines of one model; clients can connect afterwards and wait."""
        await self._named(index, self.supervisors[index].launch())

    async def connect(self, index: int) -> EngineInfo:
        """Wait until the engines of one model are up, and return the info of one."""
        return await self._named(index, self.supervisors[index].connect())

    async def _named(self, index: int, work: Awaitable[Result]) -> Result:
        """Return the result of `work`. With several models, log which one fails."""
        try:
            return await work
        except RoseinferError as error:
            if len(self.models) > 1 and not isinstance(error, EngineClosedError):  # closed as another has failed
                log.error("model %r cannot start: %s", self.models[index].name, error)
            raise

    def reports(self) -> list[EngineReport]:
        """Return a report of each engine of all models."""
        return [report for supervisor in self.supervisors for report in supervisor.reports()]

    def on_step(self, listener: Callable[[int, StepRecord], None]) -> None:
        """Call `listener` with an engine's number for each step of any engine, within half a second."""
        for supervisor in self.supervisors:
            supervisor.on_step(listener)

    async def rolling_restart(self) -> None:
        """Restart all engines, one model after the other."""
        for supervisor in self.supervisors:
            await supervisor.rolling_restart()

    async def close(self) -> None:
        """Stop all engines and wait until nothing of them is left."""
        await asyncio.gather(*(supervisor.close() for supervisor in self.supervisors))

    def _on_failure(self, model: ServedModelConfig, failure: "asyncio.Future[None]") -> None:
        error = None if failure.cancelled() else failure.exception()
        if error is None:
            return
        if not all(supervisor.failure.done() for supervisor in self.supervisors):
            log.error("model %r has failed, the other models keep serving: %s", model.name, error)
        elif not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()  # retrieved: at the end of a server perhaps no caller waits
