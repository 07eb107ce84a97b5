"""The engines of a server as their owner sees them: started, watched, started again, restarted in turn, stopped."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.cluster.devices import EngineSpec, check_memory, engine_specs, for_restart
from roseinfer.cluster.status import EngineStatus
from roseinfer.config.hub import model_folder
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.errors import EngineClosedError, EngineDeadError
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineInfo, EngineReport, EngineState, StepRecord
from roseinfer.engine.board import Board
from roseinfer.engine.life import Process
from roseinfer.engine.member import Cost, Member
from roseinfer.engine.own_process import Place, ProcessTransport
from roseinfer.engine.private import private_folder, remove_folder
from roseinfer.engine.silence import INTERVAL_S

log = logging.getLogger(__name__)

# Between looks at whether another engine serves.
LOOK_S = 0.05

Make = Callable[[EngineConfig, Path, Place], Process]


class EngineCrew:
    """One engine or several, each in a process of its own: `launch`, then `connect`, then `close`.

    `addresses`: where clients find each engine, whichever process it is at the time; `board_path`: the `Board` with its
    promise and standing. `folder` is removed with the crew, however it ends. All engines load at the same time: the
    pages of a checkpoint are read once for all of them.

    An engine that dies, or is silent for too long and killed for it, is started again, see `Member`; the others serve
    on. `failure` is set to an exception when none is left that could come back. Belongs to one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        replicas: ReplicasConfig,
        *,
        stall_s: float,
        clock: Clock | None = None,
        make: Make = ProcessTransport,
    ) -> None:
        """`stall_s`: seconds of silence after which an engine is killed. `make`: makes an engine's process.

        Raises `ResourceError` if there is no room for `folder`, and what `hub.model_folder` raises.
        """
        self._config = config
        self._replicas = replicas
        self._stall_s = stall_s
        self._clock = clock or MonotonicClock()
        self._make = make
        self._model = model_folder(config.model)
        self.folder = private_folder()
        self.board_path = self.folder / "board"
        try:
            self._board = Board.create(self.board_path, replicas.count)
        except BaseException:
            remove_folder(self.folder)
            raise
        self.addresses = [self._place(index).address for index in range(replicas.count)]
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.launching = asyncio.Lock()
        self._members: list[Member] = []
        self._listeners: list[Callable[[int, StepRecord], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._rolling: asyncio.Task[None] | None = None
        self._up = self._closed = False

    async def launch(self) -> None:
        """Start all processes; clients can connect from now on, and wait.

        Raises `ConfigError` if devices or memory do not suffice.
        """
        try:
            specs = await asyncio.to_thread(self._specs)
        except BaseException:
            await self.close()
            raise
        self._members = [self._member(index, spec) for index, spec in enumerate(specs)]
        for member in self._members:
            self._spawn(member.run())
        self._spawn(self._watch())
        for member in self._members:
            await member.launched.wait()

    async def connect(self) -> EngineInfo:
        """Wait until all engines are up. Of what differs between them, the info has the least.

        Raises what keeps any of them from starting; all are stopped then.
        """
        try:
            infos = await asyncio.gather(*(asyncio.shield(member.first) for member in self._members))
        except BaseException:
            await self.close()
            raise
        self._up = True
        facts = replace(
            infos[0].facts,
            max_model_len=min(info.facts.max_model_len for info in infos),
            num_blocks=min(info.facts.num_blocks for info in infos),
        )
        return replace(infos[0], facts=facts)

    @property
    def places(self) -> EngineAddresses:
        return EngineAddresses(list(map(str, self.addresses)), str(self.board_path))

    def reports(self) -> list[EngineReport]:
        """How each engine does. Counts go on over restarts."""
        return [member.report() for member in self._members]

    def status(self, engine: int) -> EngineStatus:
        """What clients of an engine read of it, beside its promise."""
        return self._board.status(engine)

    def promise(self, engine: int) -> Promise | None:
        """The newest; None: there is none."""
        return self._board.promise(engine)

    def on_step(self, listener: Callable[[int, StepRecord], None]) -> None:
        """Have `listener` called with an engine's number for each of its steps, within half a second."""
        self._listeners.append(listener)

    async def roll(self) -> None:
        """Restart all engines, one after the other, each when the one before has settled.

        One that is to be restarted gets no more requests and may end those it has for `drain_timeout` seconds. With one
        engine there is none to serve meanwhile. A call while this is under way waits for its end.
        """
        if not self._up or self._closed:
            log.warning("no rolling restart: the engines are not all up")
            return
        if self._rolling is None or self._rolling.done():
            self._rolling = self._spawn(self._roll())
        else:
            log.info("a rolling restart is under way already")
        await asyncio.wait({self._rolling})

    async def drain(self, drain_s: float) -> None:
        """All engines get no more requests; returns when they have none left, or after `drain_s` seconds."""
        await asyncio.gather(*(member.drain(drain_s) for member in self._members))

    async def close(self) -> None:
        """Stop all engines and wait until nothing of them is left."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self._members:
            member.end(EngineClosedError("the engine was closed"))
        self._board.close()
        remove_folder(self.folder)

    # --- members ------------------------------------------------------------------------------------------------
    def _place(self, index: int, **given: Any) -> Place:
        return Place(private=self.folder, index=index, **given)

    def _specs(self) -> list[EngineSpec]:
        specs = engine_specs(self._config, self._replicas)
        check_memory(specs, self._model)
        return specs

    def _member(self, index: int, spec: EngineSpec) -> Member:
        return Member(
            index,
            spec.kind,
            partial(self._process, index, spec),
            self._board,
            self,
            self._clock,
            quiet_s=self._replicas.engine_timeout,
            hung_s=self._stall_s,
        )

    def _process(self, index: int, spec: EngineSpec, number: int, cost: Cost | None) -> Process:
        place = self._place(index, environment=spec.environment, board=self.board_path, cost_s=cost)
        return self._make(for_restart(spec.config, number), self._model, place)

    def cost_for(self, member: Member) -> Cost | None:
        """What it learnt itself, else what another one did on such a device."""
        if member.learnt is not None:
            return member.learnt
        alike = (other.learnt for other in self._members if other.kind == member.kind and other.learnt is not None)
        return next(alike, None)

    def stepped(self, index: int, step: StepRecord) -> None:
        for listener in self._listeners:
            listener(index, step)

    def given_up(self, member: Member) -> None:
        if all(other.final for other in self._members):
            died = "the engine has died" if len(self._members) == 1 else "all engines have died"
            self._fail(EngineDeadError(f"{died} time and again, at last because {member.report().health.error}"))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            for member in self._members:
                member.look()

    # --- rolling ------------------------------------------------------------------------------------------------
    async def _roll(self) -> None:
        for member in self._members:
            await self._another_serves(member)
            log.info("rolling restart: engine %d", member.index)
            if not await member.renew(self._replicas.drain_timeout, partial(self._spared, member)):
                log.error("engine %d does not come back: the rolling restart ends here", member.index)
                return
        log.info("rolling restart: done")

    async def _another_serves(self, member: Member) -> None:
        """Wait until another engine takes requests, if there is one that can."""
        while not self._spared(member):
            await asyncio.sleep(LOOK_S)
        if all(other.final for other in self._members if other is not member):
            log.warning("there is no other engine: until engine %d is back, requests are refused", member.index)

    def _spared(self, member: Member) -> bool:
        """Whether another engine takes requests, or none ever will."""
        others = [other for other in self._members if other is not member and not other.final]
        return not others or any(other.state is EngineState.READY for other in others)

    # --- tasks --------------------------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        """Without a task that looks after them the engines would be nobody's: its failure is everybody's."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the engines cannot be looked after", exc_info=error)
            self._fail(error)
            for member in self._members:
                member.end(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)
            # Whoever waits for it hears of it; at the end of a server there may be nobody.
            with contextlib.suppress(BaseException):
                self.failure.exception()
