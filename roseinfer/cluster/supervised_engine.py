"""One engine of a supervisor: its present process, and the next one when that has ended."""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from roseinfer.cluster.devices import EngineSpec
from roseinfer.cluster.engine_rows import EngineRows
from roseinfer.cluster.status import EngineStatus
from roseinfer.core.clock import Clock
from roseinfer.core.errors import EngineDeadError, RoseinferError
from roseinfer.core.outputs import SchedulerStats, carry_counters
from roseinfer.core.step_cost import StepCost
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport, EngineState, StepRecord
from roseinfer.engine.client import EngineMonitor
from roseinfer.engine.messages import DrainEngine, EngineMessage
from roseinfer.engine.process_transport import EngineProcess
from roseinfer.processes.heartbeat import CHECK_INTERVAL_S, HeartbeatAge, HeartbeatMonitor
from roseinfer.processes.supervise import POLL_S, LaunchError, RestartLimits, RestartLoop, Restarts, finish, until

log = logging.getLogger("roseinfer.cluster.supervisor")

# A start that takes so many times as long as the longest successful one has failed, but not before the minimum.
MAX_START_FACTOR, MIN_START_TIMEOUT_S = 10.0, 600.0
# A restarted engine has settled after so many steps, or so many seconds if it gets no work.
SETTLED_STEPS, SETTLE_S = 50, 5.0


@dataclass(frozen=True, slots=True)
class SupervisorTimes:
    """Intervals and limits of a supervisor.

    `check_interval_s`: between heartbeat checks. `poll_s`: between looks at promises and states that it waits for.
    `late_s`, `timeout_s`: see `HeartbeatMonitor`.
    """

    restarts: RestartLimits = field(default_factory=RestartLimits)
    check_interval_s: float = CHECK_INTERVAL_S
    settle_s: float = SETTLE_S
    poll_s: float = POLL_S
    late_s: float = inf
    timeout_s: float = inf
    drain_timeout_s: float = inf


class SupervisorCallbacks(Protocol):
    """Supervisor of a `SupervisedEngine`, as that sees it."""

    def make_process(self, engine: "SupervisedEngine", number: int) -> EngineProcess:
        """Return the transport to the engine's process of this number."""
        ...

    def on_engine_step(self, index: int, step: StepRecord) -> None: ...

    def on_given_up(self, engine: "SupervisedEngine") -> None:
        """Note that the engine will not be restarted."""
        ...


class EngineRun(EngineMonitor):
    """One process of an engine from launch to end. `message_count`: messages received, which count as heartbeats."""

    def __init__(self, process: EngineProcess, clock: Clock) -> None:
        super().__init__(process, clock)
        self.process = process
        self.ended = asyncio.Event()
        self.message_count = 0
        self.killed = False  # it may take a while to end
        self.dump_requested = self.dump_logged = False
        self._began_s = clock.now()

    async def launch(self) -> None:
        await self.process.launch(self._on_message, self._on_death)

    @property
    def age_s(self) -> float:
        return self._clock.now() - self._began_s

    @property
    def death(self) -> str:
        """Return why it has ended."""
        return self._death or "it was stopped"

    @property
    def stopped(self) -> bool:
        """True if the process is stopped, by SIGSTOP or a debugger."""
        stats = self.process.stats()
        return stats is not None and stats.stopped

    async def end(self, *, unresponsive: bool) -> None:
        """End the process and wait until nothing of it is left."""
        try:
            if unresponsive or self.stopped:  # it would not read that it is to end
                self.process.kill()
        finally:
            await self.close()

    def _on_message(self, message: EngineMessage) -> None:
        self.message_count += 1
        super()._on_message(message)

    def _on_death(self, reason: str) -> None:
        super()._on_death(reason)
        self.ended.set()


class SupervisedEngine:
    """An engine that is restarted when it ends or hangs, see `RestartLoop`. A `Restartable`.

    `first`: the info of its first process, or the error that kept that from starting. `launched`: set once clients can
    connect to the first process, or it has failed.
    """

    def __init__(
        self,
        index: int,
        spec: EngineSpec,
        rows: EngineRows,
        callbacks: SupervisorCallbacks,
        clock: Clock,
        times: SupervisorTimes,
    ) -> None:
        self.index = index
        self.name = f"engine {index}"
        self.spec = spec
        self.learnt: StepCost | None = None
        self.info: EngineInfo | None = None
        self.first: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.launched = asyncio.Event()
        self._rows = rows
        self._callbacks = callbacks
        self._clock = clock
        self._times = times
        self._restarts = Restarts(clock, times.restarts)
        self._loop = RestartLoop(self._run_once, self._restarts, clock, self._on_death)
        self._present: EngineRun | None = None
        self._heartbeat = HeartbeatMonitor(times.late_s, times.timeout_s)
        self._phase = EngineState.STARTING
        self._late = False
        self._error: str | None = None
        self._stats = SchedulerStats()  # of the processes that have ended
        self._longest_start_s = 0.0
        self._stopped_checks = 0

    # --- processes ----------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Run until cancelled, or until the first start has failed. Nothing is left of the process then."""
        try:
            await self._loop.run()
        except (RoseinferError, OSError) as error:
            if self.first.done():
                raise
            self.first.set_exception(error)

    async def _run_once(self, number: int) -> Exception | None:
        self._late = False
        self._stopped_checks = 0
        self._set_phase(EngineState.STARTING)
        run = EngineRun(self._callbacks.make_process(self, number), self._clock)
        run.on_step(lambda step: self._callbacks.on_engine_step(self.index, step))
        self._present = run
        try:
            await run.launch()
            self.launched.set()
            await self._bring_up(run)
            await self._until_end(run)
            return EngineDeadError(run.death) if run.ended.is_set() else None
        except RoseinferError as error:
            return error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            return LaunchError(f"cannot start an engine process: {reason}")
        finally:
            self.launched.set()
            self._present = None
            self._stats = carry_counters(self._stats, run.stats())._replace(running=0, waiting=0, blocks_used=0)
            self._set_phase(EngineState.DEAD)  # before its end is awaited, so that it gets no requests
            await finish(run.end(unresponsive=self._late))
            self._rows.clear(self.index)

    async def _bring_up(self, run: EngineRun) -> None:
        await run.connect()
        self._check_files(run.info)
        self.info = run.info
        self._longest_start_s = max(self._longest_start_s, run.age_s)
        times, computes = self._times, run.info.facts.device == "cpu"
        self._heartbeat = HeartbeatMonitor(times.late_s, times.timeout_s, computes=computes)
        self._error = None
        self._loop.came_up()
        self._set_phase(EngineState.READY)
        if not self.first.done():
            self.first.set_result(run.info)
        elif self._loop.number > 1:
            log.info("%s is up again", self.name)

    def _check_files(self, info: EngineInfo) -> None:
        if self.info is not None and info.files != self.info.files:
            log.error(
                "%s: the model's files have changed since it last started, so its outputs may differ from those of "
                "other engines: restart the server",
                self.name,
            )

    async def _until_end(self, run: EngineRun) -> None:
        """Return when the process has ended, or is to be replaced."""
        waits = [asyncio.ensure_future(event.wait()) for event in (run.ended, self._loop.restart_requested)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _on_death(self, error: Exception, delay_s: float | None) -> None:
        self._error = str(error)
        self._set_phase(EngineState.DEAD)
        if delay_s is not None:
            log.error("%s: %s. Restarting it in %g s", self.name, error, delay_s)
            return
        limits = self._restarts.limits
        log.error("%s: %s. Giving it up: %d deaths in %g s", self.name, error, limits.max_deaths, limits.window_s)
        self._callbacks.on_given_up(self)

    def fail_first(self, error: BaseException) -> None:
        """Raise `error` for callers that still wait for the first start."""
        if not self.first.done():
            self.first.set_exception(error)
        self.first.exception()  # retrieved: perhaps no caller waits

    # --- heartbeat ----------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Kill the process if it has timed out. Call this every `CHECK_INTERVAL_S` seconds."""
        run, promise = self._present, self._rows.promise(self.index)
        if promise is not None and promise.steps >= SETTLED_STEPS and promise.cost.is_known:
            self.learnt = promise.cost
        if run is None or run.killed or run.ended.is_set():
            return
        if self._phase is EngineState.STARTING:
            self._check_start(run)
            return
        stats = run.process.stats()
        age = self._heartbeat.check(
            run.message_count + self._rows.write_count(self.index),
            allowance_s=0.0 if promise is None else promise.step_s,
            stats=stats,
        )
        self._dump_stacks(run, age, stopped=stats is not None and stats.stopped)
        if age.timed_out:
            self._kill(run, f"has had no heartbeat for {age.seconds:g} s")
        elif age.late != self._late:
            self._late = age.late
            log.warning("%s %s", self.name, "does not respond" if age.late else "responds again")
            self._set_phase(self._phase)

    def _check_start(self, run: EngineRun) -> None:
        """Kill a process that does not get ready. It has no heartbeat while it loads; a stopped one does not load."""
        self._stopped_checks = self._stopped_checks + 1 if run.stopped else 0
        if self._stopped_checks * CHECK_INTERVAL_S >= self._times.timeout_s:
            self._kill(run, "was stopped while it started")
        elif self._longest_start_s and run.age_s > max(MIN_START_TIMEOUT_S, MAX_START_FACTOR * self._longest_start_s):
            self._kill(run, f"has not started within {run.age_s:g} s")

    def _dump_stacks(self, run: EngineRun, age: HeartbeatAge, *, stopped: bool) -> None:
        """Log once where an unresponsive process hangs: request its stacks at one check, read them at the next."""
        if run.dump_logged:
            return
        if run.dump_requested:
            stacks = run.process.stacks()
            run.dump_logged = bool(stacks)
            if stacks:
                log.error("%s: stacks of its threads when it did not respond:\n%s", self.name, stacks)
        elif age.late and not stopped:
            run.dump_requested = True
            run.process.request_stack_dumps()

    def _kill(self, run: EngineRun, reason: str) -> None:
        log.error("%s %s: killing it", self.name, reason)
        run.killed = True
        run.process.kill()

    # --- restart on request -------------------------------------------------------------------------------------
    async def restart(self, others_serve: Callable[[], bool]) -> bool:
        await self._until(lambda: self._phase is not EngineState.STARTING)
        run, number = self._present, self._loop.number
        if await self.drain(self._times.drain_timeout_s):
            assert run is not None
            await self._until(lambda: run.ended.is_set() or self._drained() or others_serve())
        if self._loop.number == number:  # otherwise it has died and been restarted
            self._loop.restart_now()
        await self._until(lambda: self._loop.number > number and (self.serving or self.given_up))
        return not self.given_up and await self._settle()

    async def drain(self, timeout_s: float) -> bool:
        """Let it finish its requests, and get no more, for `timeout_s` seconds. Return False if it was not up."""
        run = self._present
        if run is None or not self.serving:
            return False
        self._set_phase(EngineState.DRAINING)
        run.process.send(DrainEngine())
        await self._until(lambda: run.ended.is_set() or self._drained(), timeout_s)
        return True

    def _drained(self) -> bool:
        promise = self._rows.promise(self.index)
        return promise is not None and promise.draining and not promise.running and not promise.waiting

    async def _settle(self) -> bool:
        number = self._loop.number

        def settled() -> bool:
            promise = self._rows.promise(self.index)
            return self._loop.number != number or (promise is not None and promise.steps >= SETTLED_STEPS)

        await self._until(settled, self._times.settle_s)
        await self._until(lambda: self.serving or self.given_up)
        return not self.given_up

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        await until(condition, timeout_s, poll_s=self._times.poll_s)

    # --- state --------------------------------------------------------------------------------------------------
    @property
    def state(self) -> EngineState:
        late = self._late and self._phase in (EngineState.READY, EngineState.DRAINING)
        return EngineState.QUIET if late else self._phase

    @property
    def serving(self) -> bool:
        return self.state is EngineState.READY

    @property
    def given_up(self) -> bool:
        return self._loop.given_up

    def report(self) -> EngineReport:
        run = self._present
        health = EngineHealth(False, 0.0, self._error) if run is None else run.health()
        if self._phase is EngineState.STARTING:
            health = replace(health, alive=False, error=self._error)
        return EngineReport(
            self.index,
            self.state,
            health,
            self._stats if run is None else carry_counters(self._stats, run.stats()),
            restarts=max(0, self._loop.number - 1),
            deaths=self._restarts.deaths,
            info=self.info,
            promise=self._rows.promise(self.index),
        )

    def _set_phase(self, phase: EngineState) -> None:
        self._phase = phase
        pid = (self._present and self._present.process.pid) or 0
        self._rows.set_status(self.index, EngineStatus(self.state, self._loop.number, self.given_up, pid=pid))
