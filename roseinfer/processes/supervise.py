"""Keep child processes running: restart with back-off, give up after too many deaths, restart in turn on request.

`RestartLoop` runs one child again and again; what a run is, its owner says::

    async def run_once(number: int) -> Exception | None:
        child = launch(...)              # an OSError is returned as `LaunchError`, which is no death
        try:
            code = await child.wait()
            return None if self._stopped_on_purpose else EngineDeadError(describe_exit(code))
        finally:
            await finish(child.stop(0.0))
            child.close()

    loop = RestartLoop(run_once, Restarts(clock), on_death)
    tasks.spawn(loop.run())

`BackgroundTasks` holds the tasks of a supervisor, so that none fails unnoticed. `rolling_restart` restarts several
children, one after the other.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from roseinfer.core.clock import Clock
from roseinfer.core.errors import ResourceError

POLL_S = 0.05
Result = TypeVar("Result")


class LaunchError(ResourceError):
    """The system has no process, memory or descriptor for a child at the moment."""


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """After `max_deaths` deaths within `window_s` seconds a child is given up.

    `delays_s`: seconds before the first restart, the second, and so on; the last one repeats. A child that was up for
    `window_s` seconds begins again with the first delay.
    """

    max_deaths: int = 5
    window_s: float = 60.0
    delays_s: Sequence[float] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


class Restarts:
    """Deaths of one child, or of several that share the limits, and what follows from each."""

    def __init__(self, clock: Clock, limits: RestartLimits | None = None) -> None:
        self.deaths = 0
        self.limits = limits or RestartLimits()
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=self.limits.max_deaths)
        self._in_a_row = 0

    def served(self, seconds: float) -> None:
        """Note how long a process was up that has ended now."""
        if seconds >= self.limits.window_s:
            self._in_a_row = 0

    def died(self) -> float | None:
        """Count a death. Return seconds until the restart, None to give up."""
        limits, now_s = self.limits, self._clock.now()
        self.deaths += 1
        self._recent.append(now_s)
        delay_s = self.launch_failed()
        if len(self._recent) == limits.max_deaths and now_s - self._recent[0] <= limits.window_s:
            return None
        return delay_s

    def launch_failed(self) -> float:
        """Return seconds until the next try of a launch, which may fail for as long as the system lacks resources."""
        delays_s = self.limits.delays_s
        delay_s = delays_s[min(self._in_a_row, len(delays_s) - 1)]
        self._in_a_row += 1
        return delay_s

    def forgive(self) -> None:
        """Forget past deaths: somebody has asked for another try."""
        self._recent.clear()
        self._in_a_row = 0


class RestartLoop:
    """One child that is run again whenever it has ended.

    `run_once(number)` launches process `number`, waits until nothing of it is left, and returns the error that ended
    it, or None if it was stopped to be replaced. It calls `came_up` when the process serves. `on_death(error, delay_s)`
    is called before each pause; `delay_s` None: the child is given up until `restart_now`.
    """

    def __init__(
        self,
        run_once: Callable[[int], Coroutine[Any, Any, Exception | None]],
        restarts: Restarts,
        clock: Clock,
        on_death: Callable[[Exception, float | None], None],
    ) -> None:
        self.number = 0
        self.given_up = False
        self.restart_requested = asyncio.Event()
        self._run_once = run_once
        self._restarts = restarts
        self._clock = clock
        self._on_death = on_death
        self._up_since_s: float | None = None

    async def run(self) -> None:
        """Run until cancelled. Raises the error of the first process if that never came up."""
        ever_up = False
        while True:
            self.number += 1
            self._up_since_s = None
            self.restart_requested.clear()
            error = await self._run_once(self.number)
            if self._up_since_s is not None:
                ever_up = True
                self._restarts.served(self._clock.now() - self._up_since_s)
            if error is not None:
                if not ever_up:
                    raise error
                await self._pause(error)

    def came_up(self) -> None:
        """Note that the present process serves."""
        self._up_since_s = self._clock.now()

    def restart_now(self) -> None:
        """End the pause before a restart, or revive a child that was given up. A run sees `restart_requested`."""
        self.restart_requested.set()

    async def _pause(self, error: Exception) -> None:
        is_death = not isinstance(error, LaunchError)
        delay_s = self._restarts.died() if is_death else self._restarts.launch_failed()
        self.given_up = delay_s is None
        self._on_death(error, delay_s)
        if delay_s is None:
            await self.restart_requested.wait()
            self.given_up = False
            self._restarts.forgive()
        elif delay_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self.restart_requested.wait()


class BackgroundTasks:
    """Tasks of a supervisor. `on_failure` is called when one fails: without it, nobody would restart a child."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_failure(error)

    async def join(self) -> None:
        """Wait until all have ended, also those that one of them spawns."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel all and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Finish `work` even if the caller is cancelled, once or more: a process whose end nobody awaits would stay."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    return task.result()


async def until(condition: Callable[[], bool], timeout_s: float | None = None, *, poll_s: float = POLL_S) -> bool:
    """Wait until `condition()`, which has no event of its own. Return False after `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(poll_s)
            return True
    return False


class Restartable(Protocol):
    """One of the children that `rolling_restart` restarts."""

    @property
    def name(self) -> str: ...

    @property
    def serving(self) -> bool:
        """True while it takes new work."""
        ...

    @property
    def given_up(self) -> bool:
        """True if it will not serve again by itself."""
        ...

    async def restart(self, others_serve: Callable[[], bool]) -> bool:
        """Drain it, restart it and wait until it has settled. Return False if it does not come back.

        Work that is left after its drain time is cut only once `others_serve()`, so that they can take it over.
        """
        ...


async def rolling_restart(children: Sequence[Restartable], log: logging.Logger, *, poll_s: float = POLL_S) -> None:
    """Restart children one after the other, each once another one serves and the one before has settled.

    End at the first that does not come back; the rest keep serving as they are.
    """
    for child in children:
        others = [other for other in children if other is not child]

        def others_serve(others: Sequence[Restartable] = others) -> bool:
            """Return True also if none of them ever will."""
            left = [other for other in others if not other.given_up]
            return not left or any(other.serving for other in left)

        await until(others_serve, poll_s=poll_s)
        if all(other.given_up for other in others):
            log.warning("no other engine serves: requests are rejected until %s is back", child.name)
        log.info("rolling restart: %s", child.name)
        if not await child.restart(others_serve):
            log.error("%s does not come back: the rolling restart stops here", child.name)
            return
    log.info("rolling restart: done")
