"""One engine of several as its owner sees it: its process, and the next one when that has ended."""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from roseinfer.cluster.status import EngineStatus
from roseinfer.core.clock import Clock
from roseinfer.core.errors import EngineDeadError, ResourceError, RoseinferError
from roseinfer.core.outputs import SchedulerStats, carry_counters
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport, EngineState, StepRecord
from roseinfer.engine.board import Board
from roseinfer.engine.life import Life, Process, closed, vitals_of
from roseinfer.engine.messages import Drain
from roseinfer.engine.silence import INTERVAL_S, Listening, Silence

log = logging.getLogger("roseinfer.engine.crew")

Cost = tuple[float, float, float, float, float]

# So many deaths within so many seconds, and the engine is not started again.
MAX_DEATHS, DEATHS_WINDOW_S = 5, 60.0
# Before each start after a death, as long as none was up for `DEATHS_WINDOW_S`; the last one repeats.
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# A start has failed that takes so many times as long as the longest that succeeded, and at least so many seconds.
START_FACTOR, LEAST_START_S = 10.0, 600.0
# An engine that was restarted on purpose has settled after so many steps, or so many seconds if it gets no work.
SETTLED_STEPS, SETTLE_S = 50, 5.0
_LOOK_S = 0.05


class Audience(Protocol):
    """Who is told of a member. `launching`: processes are made one by one, so that signals are heeded in between."""

    launching: asyncio.Lock

    def cost_for(self, member: "Member") -> Cost | None:
        """What engines on such a device have learnt that steps cost."""
        ...

    def stepped(self, index: int, step: StepRecord) -> None: ...

    def given_up(self, member: "Member") -> None:
        """It is not started again."""
        ...


class Member:
    """An engine that is started again when it ends or hangs, at first at once, then after longer and longer pauses,
    until it dies five times within a minute. What keeps its first process from starting is in `first`, and ends it.

    `start(number, cost)` makes its next process; `launched` is set once the first can be connected to, or has failed.
    `quiet_s`, `hung_s`: how long it may give no sign of life, see `Listening`.
    """

    def __init__(
        self,
        index: int,
        kind: str,
        start: Callable[[int, Cost | None], Process],
        board: Board,
        audience: Audience,
        clock: Clock,
        *,
        quiet_s: float,
        hung_s: float,
    ) -> None:
        self.index = index
        self.kind = kind
        self.learnt: Cost | None = None
        self.info: EngineInfo | None = None
        self.first: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.number = 0
        self.deaths = 0
        self._start = start
        self._board = board
        self._audience = audience
        self._clock = clock
        self._limits_s = (quiet_s, hung_s)
        self._life: Life | None = None
        self._listening = Listening(quiet_s, hung_s, on_cpu=False)
        self._phase = EngineState.STARTING
        self._quiet = False
        self._final = False
        self._error: str | None = None
        self._stats = SchedulerStats()  # of the processes that have ended
        self._lately: deque[float] = deque(maxlen=MAX_DEATHS)
        self._in_a_row = 0
        self._longest_start_s = 0.0
        self._stopped_looks = 0
        self._renewing = asyncio.Event()
        self.launched = asyncio.Event()

    # --- its life -----------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Until it is cancelled, or there was no first start. Then nothing is left of the process."""
        while True:
            error = await self._live()
            if not self.first.done():
                assert error is not None
                self.first.set_exception(error)
                return
            if error is not None:
                await self._recover(error)

    async def _live(self) -> Exception | None:
        """One process, from its launch to its end. What ended it, None if it was to end."""
        self.number += 1
        self._renewing.clear()
        self._quiet = False
        self._say(EngineState.STARTING)
        life = Life(self._start(self.number, self._audience.cost_for(self)), self._clock)
        life.on_step(lambda step: self._audience.stepped(self.index, step))
        self._life = life
        self._stopped_looks = 0
        try:
            async with self._audience.launching:
                await life.launch()
            self.launched.set()
            await self._bring_up(life)
            await self._ends(life)
            return EngineDeadError(life.death) if life.ended.is_set() else None
        except (RoseinferError, OSError) as error:
            return _typed(error)
        finally:
            self.launched.set()
            self._life = None
            self._stats = carry_counters(self._stats, life.stats())._replace(running=0, waiting=0, blocks_used=0)
            self._say(EngineState.DEAD)  # before its end is waited for: nobody shall send it anything
            await _to_its_end(closed(life, quiet=self._quiet))
            self._board.clear(self.index)

    async def _bring_up(self, life: Life) -> None:
        """Raises what keeps it from starting."""
        await life.connect()
        self.info = life.info
        self._longest_start_s = max(self._longest_start_s, life.age_s)
        self._listening = Listening(*self._limits_s, on_cpu=life.info.facts.device == "cpu")
        self._error = None
        self._say(EngineState.READY)
        if not self.first.done():
            self.first.set_result(life.info)
        elif self.number > 1:
            log.info("engine %d is up again", self.index)

    async def _ends(self, life: Life) -> None:
        """Returns when it has ended, or is to end."""
        up_s = self._clock.now()
        waits = [asyncio.ensure_future(event.wait()) for event in (life.ended, self._renewing)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._clock.now() - up_s >= DEATHS_WINDOW_S:
            self._in_a_row = 0

    async def _recover(self, error: Exception) -> None:
        """Count a death, and return when the next process is due."""
        now_s = self._clock.now()
        self.deaths += 1
        self._error = str(error)
        self._lately.append(now_s)
        pause_s = BACKOFF_S[min(self._in_a_row, len(BACKOFF_S) - 1)]
        self._in_a_row += 1
        if len(self._lately) == MAX_DEATHS and now_s - self._lately[0] <= DEATHS_WINDOW_S:
            log.error("engine %d: %s. It is given up: %d deaths in a minute", self.index, error, MAX_DEATHS)
            self._final = True
            self._say(EngineState.DEAD)
            self._audience.given_up(self)
            await self._renewing.wait()
            self._final = False
            self._lately.clear()
            self._in_a_row = 0
            return
        log.error("engine %d: %s. It is started again in %g s", self.index, error, pause_s)
        self._say(EngineState.DEAD)
        if pause_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._renewing.wait()

    def end(self, error: BaseException) -> None:
        """Who still waits for the first start does so in vain, because of that."""
        if not self.first.done():
            self.first.set_exception(error)
        self.first.exception()  # it may be that of an engine that nobody has asked for any more

    # --- whether it lives ---------------------------------------------------------------------------------------
    def look(self) -> None:
        """To be called every `INTERVAL_S` seconds: has it been silent for too long?"""
        life, promise = self._life, self._board.promise(self.index)
        if promise is not None and promise.steps >= SETTLED_STEPS and any(promise.cost_s):
            self.learnt = *promise.cost_s, promise.expert_s
        if life is None or life.killed or life.ended.is_set():
            return
        seen = vitals_of(life)
        if self._phase is EngineState.STARTING:
            # It says nothing while it loads, but a process that is stopped does not load.
            self._look_at_start(life, stopped=seen is not None and seen.stopped)
            return
        silence = self._listening.look(
            life.signs + self._board.write_count(self.index), 0.0 if promise is None else promise.step_s, seen
        )
        self._look_at_stacks(life, silence, stopped=seen is not None and seen.stopped)
        if silence.hung:
            self._kill(life, f"has given no sign of life for {silence.seconds:g} s")
        elif silence.quiet != self._quiet:
            self._quiet = silence.quiet
            log.warning("engine %d %s", self.index, "gives no sign of life" if silence.quiet else "is heard again")
            self._say(self._phase)

    def _look_at_stacks(self, life: Life, silence: Silence, *, stopped: bool) -> None:
        """Of one that does nothing, though it could, the log says once where: it writes that until the next look."""
        if life.stacks_told:
            return
        if life.stacks_asked:
            where = life.process.stacks()
            life.stacks_told = bool(where)
            if where:
                log.error("engine %d: where its threads were when it gave no sign of life:\n%s", self.index, where)
        elif silence.quiet and not stopped:
            life.stacks_asked = True
            life.process.request_stack_dumps()

    def _look_at_start(self, life: Life, *, stopped: bool) -> None:
        self._stopped_looks = self._stopped_looks + 1 if stopped else 0
        if self._stopped_looks * INTERVAL_S >= self._limits_s[1]:
            self._kill(life, "was stopped while it started")
        elif self._longest_start_s and life.age_s > max(LEAST_START_S, START_FACTOR * self._longest_start_s):
            self._kill(life, f"has not come up within {life.age_s:g} s")

    def _kill(self, life: Life, why: str) -> None:
        log.error("engine %d %s: killing it", self.index, why)
        life.killed = True
        life.process.kill()

    # --- restarting it on purpose -------------------------------------------------------------------------------
    async def renew(self, drain_s: float, spared: Callable[[], bool]) -> bool:
        """Let it end its requests for `drain_s` seconds, and longer until what is left may go on elsewhere (`spared`);
        then start it anew. Returns when that one has settled; False if it does not come back.
        """
        await self._until(lambda: self._phase is not EngineState.STARTING)
        life, number = self._life, self.number
        if await self.drain(drain_s):
            assert life is not None
            await self._until(lambda: life.ended.is_set() or self._drained() or spared())
        if self.number == number:  # else it has died, and another has taken its place
            self._renewing.set()
        await self._until(lambda: self.number > number and (self._phase is EngineState.READY or self._final))
        return not self._final and await self._settle()

    async def drain(self, drain_s: float) -> bool:
        """Let it end its requests, and get no more, for `drain_s` seconds. False if it was not up."""
        life = self._life
        if life is None or self._phase is not EngineState.READY:
            return False
        self._say(EngineState.DRAINING)
        life.send(Drain())
        await self._until(lambda: life.ended.is_set() or self._drained(), drain_s)
        return True

    def _drained(self) -> bool:
        promise = self._board.promise(self.index)
        return promise is not None and promise.draining and not promise.running and not promise.waiting

    async def _settle(self) -> bool:
        number = self.number

        def settled() -> bool:
            promise = self._board.promise(self.index)
            return self.number != number or (promise is not None and promise.steps >= SETTLED_STEPS)

        await self._until(settled, SETTLE_S)
        await self._until(lambda: self._phase is EngineState.READY or self._final)
        return not self._final

    async def _until(self, condition: Callable[[], bool], most_s: float | None = None) -> None:
        """Looks now and then: promises come without a call."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while not condition():
                    await asyncio.sleep(_LOOK_S)

    # --- what is said of it -------------------------------------------------------------------------------------
    @property
    def state(self) -> EngineState:
        silent = self._quiet and self._phase in (EngineState.READY, EngineState.DRAINING)
        return EngineState.QUIET if silent else self._phase

    @property
    def final(self) -> bool:
        """Whether it is not started again."""
        return self._final

    def report(self) -> EngineReport:
        life = self._life
        health = EngineHealth(False, 0.0, self._error) if life is None else life.health()
        if self._phase is EngineState.STARTING:
            health = replace(health, alive=False, error=self._error)
        stats = self._stats if life is None else carry_counters(self._stats, life.stats())
        restarts, promise = max(0, self.number - 1), self._board.promise(self.index)
        return EngineReport(self.index, self.state, health, stats, restarts, self.deaths, self.info, promise=promise)

    def _say(self, phase: EngineState) -> None:
        self._phase = phase
        self._board.set_status(self.index, EngineStatus(self.state, self.number, self._final))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Also if we are cancelled meanwhile, be it twice: a process whose end nobody awaits would live on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def _typed(error: Exception) -> Exception:
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else str(error)
        return ResourceError(f"no engine process can be started: {reason}")
    return error
