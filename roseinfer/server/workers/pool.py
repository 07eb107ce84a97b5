"""The worker processes of a server: started, watched, replaced when they die or hang, stopped."""

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from roseinfer.core import errors
from roseinfer.core.clock import Clock
from roseinfer.core.errors import RoseinferError
from roseinfer.server.workers.control import Broken, Drain, FromManager, FromWorker, Idle, Serving, Stop, Up
from roseinfer.server.workers.heartbeat import INTERVAL_S, Heartbeats
from roseinfer.server.workers.launch import WorkerProcess

log = logging.getLogger(__name__)

# So many workers may die within so many seconds before the server gives up.
MAX_DEATHS, DEATHS_WINDOW_S = 5, 60.0
# How long a worker may take to end when it was told to.
STOP_PATIENCE_S = 8.0
# Between attempts to start a worker when the machine has no process or memory for it; the last one repeats.
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# So many attempts in a row may fail while no worker is left before the server gives up.
MAX_FAILURES_ALONE = 4


class WorkersDiedError(RoseinferError):
    """API workers die as fast as they are replaced, or none is left and none can be started."""


class Listener(Protocol):
    """Who is told of what happens to the workers."""

    def serving(self, worker: WorkerProcess) -> None:
        """It takes connections."""
        ...

    def up(self, worker: WorkerProcess) -> None:
        """It takes requests."""
        ...

    def quiet(self, worker: WorkerProcess) -> None:
        """`worker.quiet` has changed."""
        ...

    def received(self, worker: WorkerProcess, message: FromWorker) -> None: ...

    def gone(self, worker: WorkerProcess) -> None:
        """Its process has ended."""
        ...


class Launches(Protocol):
    async def launch(
        self, index: int, number: int, on_message: Callable[[WorkerProcess, FromWorker], None]
    ) -> WorkerProcess:
        """Raises `OSError` if there is no process, memory or descriptor for it."""
        ...


class WorkerPool:
    """A worker that dies, or hangs and is killed for it, is replaced while `replacing()` says so.

    `failure` is set to an exception when there is no going on: a worker says that it is broken before all have been up,
    too many die, or the last one and there is no other.
    """

    def __init__(
        self,
        size: int,
        launcher: Launches,
        listener: Listener,
        replacing: Callable[[], bool],
        heartbeats: Heartbeats,
        clock: Clock,
    ) -> None:
        self.workers: dict[int, WorkerProcess] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._size = size
        self._launcher = launcher
        self._listener = listener
        self._replacing = replacing
        self._heartbeats = heartbeats
        self._clock = clock
        self._numbers = itertools.count(1)
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._complete = False
        self._draining = False
        self._leaving = asyncio.Event()

    async def start(self) -> None:
        """Start all workers and wait until they are up. Raises `WorkersDiedError` if one cannot be started."""
        self._spawn(self._watch_heartbeats())
        for index in range(self._size):
            try:
                await self._launch(index)
            except OSError as error:
                raise WorkersDiedError(f"cannot start an API worker: {_reason(error)}") from error
        await self._until(lambda: len(self.workers) == self._size and all(w.up for w in self.workers.values()))
        self._complete = True

    def drain(self) -> None:
        """Have all workers, those that are still being started too, take no more requests."""
        self._draining = True
        self.send(Drain())

    async def idle(self) -> None:
        """Returns when no worker has a request left; they have been told to take no more."""
        await self._until(lambda: all(worker.idle for worker in self.workers.values()))

    async def stop(self) -> None:
        """Have all workers end, those that do not by force."""
        self._leaving.set()
        self.send(Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_PATIENCE_S):
                await self._all_done()
        for worker in self.workers.values():
            log.warning("API worker %d does not end by itself: killing it", worker.index)
            worker.kill()
        await self._all_done()

    def send(self, message: FromManager) -> None:
        """To all of them."""
        for worker in self.workers.values():
            worker.send(message)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _all_done(self) -> None:
        while self._tasks:  # one of them may be starting a worker, which is then watched by another
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        """Without a task that looks after them the workers would be nobody's: its failure is everybody's."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    # --- coming and going ---------------------------------------------------------------------------------------
    async def _launch(self, index: int) -> None:
        worker = await self._launcher.launch(index, next(self._numbers), self._on_message)
        self.workers[index] = worker
        self._spawn(self._watch(worker))
        # What all have been told while it was being started, and it was not yet among them.
        if self._draining:
            worker.send(Drain())
        if self._leaving.is_set():
            worker.send(Stop())

    async def _watch(self, worker: WorkerProcess) -> None:
        code = await worker.process.wait()
        del self.workers[worker.index]
        self._listener.gone(worker)
        worker.close()
        self._changed.set()
        if self._replacing() and not self._leaving.is_set():
            log.error(
                "API worker %d ended with code %s; its requests are lost, another takes its place", worker.index, code
            )
            await self._replace(worker.index)
        elif not self.workers and not self._leaving.is_set():
            self._fail(WorkersDiedError("the last API worker has died"))

    async def _replace(self, index: int) -> None:
        now_s = self._clock.now()
        self._deaths.append(now_s)
        if len(self._deaths) == MAX_DEATHS and now_s - self._deaths[0] <= DEATHS_WINDOW_S:
            self._fail(WorkersDiedError(f"{MAX_DEATHS} API workers have died within {DEATHS_WINDOW_S:g} seconds"))
            return
        alone = 0
        for delay_s in itertools.chain(BACKOFF_S, itertools.repeat(BACKOFF_S[-1])):
            try:
                await self._launch(index)
                return
            except OSError as error:
                alone = 0 if self.workers else alone + 1
                if alone == MAX_FAILURES_ALONE:
                    message = f"no API worker is left, and none can be started: {_reason(error)}"
                    self._fail(WorkersDiedError(message))
                    return
                log.error("cannot start API worker %d (%s); next try in %g s", index, _reason(error), delay_s)
            if await self._leaves_within(delay_s) or not self._replacing():
                break
        if not self.workers and not self._leaving.is_set():
            self._fail(WorkersDiedError("the last API worker has died"))

    async def _leaves_within(self, seconds: float) -> bool:
        """Waits so long, or until the pool is stopped."""
        try:
            async with asyncio.timeout(seconds):
                await self._leaving.wait()
        except TimeoutError:
            return False
        return True

    # --- whether they move --------------------------------------------------------------------------------------
    async def _watch_heartbeats(self) -> None:
        while not await self._leaves_within(INTERVAL_S):
            for worker in list(self.workers.values()):
                self._look_at(worker)

    def _look_at(self, worker: WorkerProcess) -> None:
        silence = self._heartbeats.look(worker.index, worker.number, serving=worker.serving)
        if silence.hung and not worker.hung:
            worker.hung = True
            log.error("API worker %d has not moved for %g s: killing it", worker.index, silence.seconds)
            worker.kill()
        if silence.quiet != worker.quiet:
            worker.quiet = silence.quiet
            self._listener.quiet(worker)

    # --- what they say ------------------------------------------------------------------------------------------
    def _on_message(self, worker: WorkerProcess, message: FromWorker) -> None:
        if isinstance(message, Serving):
            worker.serving = True
            self._listener.serving(worker)
        elif isinstance(message, Up):
            worker.up = True
            self._listener.up(worker)
            if self._complete:
                log.info("API worker %d takes requests", worker.index)
        elif isinstance(message, Idle):
            worker.idle = True
        elif isinstance(message, Broken):
            self._on_broken(worker, message)
        else:
            self._listener.received(worker, message)
        self._changed.set()

    def _on_broken(self, worker: WorkerProcess, message: Broken) -> None:
        log.debug("API worker %d is broken: %s", worker.index, message.message)
        if self._complete:
            worker.send(Stop())
        elif not self._leaving.is_set():
            self._fail(_typed(message))


def _typed(message: Broken) -> Exception:
    kind = getattr(errors, message.error, None)
    if isinstance(kind, type) and issubclass(kind, RoseinferError):
        return kind(message.message)
    return WorkersDiedError(f"an API worker cannot start: {message.message}")


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
