"""Supervisor of the worker processes of a server: starts them, restarts those that die or hang, stops them."""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from roseinfer.core.clock import Clock
from roseinfer.core.errors import RoseinferError
from roseinfer.processes.heartbeat import CHECK_INTERVAL_S, HeartbeatMonitor
from roseinfer.processes.launch import describe_exit
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.processes.supervise import BackgroundTasks, RestartLimits, Restarts
from roseinfer.server.workers.counters import Count
from roseinfer.server.workers.launch import WorkerProcess
from roseinfer.server.workers.messages import (
    DrainWorker,
    FromManager,
    FromWorker,
    Idle,
    Serving,
    Stop,
    Up,
    WorkerFailed,
)

log = logging.getLogger(__name__)

# All workers share these limits. A worker that dies is restarted at once.
LIMITS = RestartLimits(max_deaths=5, window_s=60.0, delays_s=(0.0,))
# A worker whose heartbeat is older gets no connections.
LATE_S = 1.0
# A worker that starts imports and connects before its first heartbeat, which may take long on a slow disk.
START_TIMEOUT_S = 120.0
# Workers that were told to stop have this long.
STOP_TIMEOUT_S = 8.0
# Pauses between launches that fail, as the machine has no process or memory; the last one repeats.
LAUNCH_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# Failed launches in a row, while no worker is left, before the server gives up.
MAX_FAILED_LAUNCHES_COUNT = 4


class WorkersDiedError(RoseinferError):
    """API workers die too often, or none is left and none can be started."""


class PoolCallbacks(Protocol):
    """Callbacks of a `WorkerPool`."""

    def on_serving(self, worker: WorkerProcess) -> None:
        """Handle a worker that takes connections."""
        ...

    def on_up(self, worker: WorkerProcess) -> None:
        """Handle a worker that takes requests."""
        ...

    def on_late(self, worker: WorkerProcess) -> None:
        """Handle a change of `worker.late`."""
        ...

    def on_message(self, worker: WorkerProcess, message: FromWorker) -> None:
        """Handle a message that is not about the worker's state."""
        ...

    def on_end(self, worker: WorkerProcess) -> None:
        """Handle the end of a worker's process."""
        ...


# Launches a worker with an index and a number, and passes its messages on. Raises `OSError`.
LaunchWorker = Callable[[int, int, Callable[[WorkerProcess, FromWorker], None]], Awaitable[WorkerProcess]]


class WorkerPool:
    """Workers that are restarted when they die or hang, while `restarts_enabled()`.

    `failure` gets an exception when the server must end: a worker fails before all have been up, workers die too often,
    or the last one has died. `timeout_s`: age of the heartbeat of a worker that hangs.
    """

    def __init__(
        self,
        size: int,
        launch: LaunchWorker,
        callbacks: PoolCallbacks,
        restarts_enabled: Callable[[], bool],
        counters: SharedRows[Any],
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self.workers: dict[int, WorkerProcess] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._size = size
        self._launch_worker = launch
        self._callbacks = callbacks
        self._restarts_enabled = restarts_enabled
        self._counters = counters
        self._timeout_s = timeout_s
        self._restarts = Restarts(clock, LIMITS)
        self._monitors: dict[WorkerProcess, HeartbeatMonitor] = {}
        self._numbers = itertools.count(1)
        self._tasks = BackgroundTasks(self._fail)
        self._changed = asyncio.Event()
        self._complete = False
        self._draining = False
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Start all workers and wait until they are up. Raises `WorkersDiedError` if one cannot be started."""
        self._tasks.spawn(self._check_heartbeats())
        for index in range(self._size):
            try:
                await self._launch(index)
            except OSError as error:
                raise WorkersDiedError(f"cannot start an API worker: {_reason(error)}") from error
        await self._until(lambda: len(self.workers) == self._size and all(w.up for w in self.workers.values()))
        self._complete = True

    def drain(self) -> None:
        """Have all workers take no more requests, including those that are still being started."""
        self._draining = True
        self.send(DrainWorker())

    async def idle(self) -> None:
        """Wait until no draining worker has a request left."""
        await self._until(lambda: all(worker.idle for worker in self.workers.values()))

    async def stop(self) -> None:
        """Stop all workers; kill those that do not end in time, and at once those that serve nobody yet."""
        self._stopping.set()
        for worker in self.workers.values():
            if not worker.serving:  # it may import for longer than it would be waited for
                worker.child.kill()
        self.send(Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._tasks.join()
        for worker in self.workers.values():
            log.warning("API worker %d does not end by itself: killing it", worker.index)
            worker.child.kill()
        await self._tasks.join()

    def send(self, message: FromManager) -> None:
        """Send a message to all workers."""
        for worker in self.workers.values():
            worker.send(message)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not self.failure.done():
            self.failure.set_exception(error)

    # --- starts and ends ----------------------------------------------------------------------------------------
    async def _launch(self, index: int) -> None:
        worker = await self._launch_worker(index, next(self._numbers), self._on_message)
        self.workers[index] = worker
        start_s = max(self._timeout_s, START_TIMEOUT_S)
        self._monitors[worker] = HeartbeatMonitor(start_s, start_s)
        self._tasks.spawn(self._watch(worker))
        # Messages that all workers got while this one was being launched.
        if self._draining:
            worker.send(DrainWorker())
        if self._stopping.is_set():
            worker.send(Stop())

    async def _watch(self, worker: WorkerProcess) -> None:
        code = await worker.child.wait()
        del self.workers[worker.index], self._monitors[worker]
        self._callbacks.on_end(worker)
        worker.close()
        self._changed.set()
        if self._restarts_enabled() and not self._stopping.is_set():
            end = describe_exit(code, by_us=worker.timed_out)
            log.error("API worker %d %s; its requests are lost; it is restarted", worker.index, end)
            await self._restart(worker.index)
        else:
            self._check_any_left()

    async def _restart(self, index: int) -> None:
        if self._restarts.died() is None:
            limits = self._restarts.limits
            message = f"{limits.max_deaths} API workers have died within {limits.window_s:g} seconds"
            self._fail(WorkersDiedError(message))
            return
        failed_alone = 0
        for delay_s in itertools.chain(LAUNCH_DELAYS_S, itertools.repeat(LAUNCH_DELAYS_S[-1])):
            try:
                await self._launch(index)
                return
            except OSError as error:
                failed_alone = 0 if self.workers else failed_alone + 1
                if failed_alone == MAX_FAILED_LAUNCHES_COUNT:
                    message = f"no API worker is left, and none can be started: {_reason(error)}"
                    self._fail(WorkersDiedError(message))
                    return
                log.error("cannot start API worker %d (%s); next try in %g s", index, _reason(error), delay_s)
            if await self._stops_within(delay_s) or not self._restarts_enabled():
                break
        self._check_any_left()

    def _check_any_left(self) -> None:
        if not self.workers and not self._stopping.is_set():
            self._fail(WorkersDiedError("the last API worker has died"))

    async def _stops_within(self, seconds: float) -> bool:
        """Return True if the pool is stopped within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    # --- heartbeats ---------------------------------------------------------------------------------------------
    async def _check_heartbeats(self) -> None:
        while not await self._stops_within(CHECK_INTERVAL_S):
            for worker in list(self.workers.values()):
                self._check_heartbeat(worker)

    def _check_heartbeat(self, worker: WorkerProcess) -> None:
        age = self._monitors[worker].check(self._counters.get(worker.index, Count.BEATS))
        if age.timed_out and not worker.timed_out:
            worker.timed_out = True
            log.error("API worker %d: no heartbeat for %g s: killing it", worker.index, age.seconds)
            worker.child.kill()
        if worker.serving and age.late != worker.late:
            worker.late = age.late
            self._callbacks.on_late(worker)

    # --- messages -----------------------------------------------------------------------------------------------
    def _on_message(self, worker: WorkerProcess, message: FromWorker) -> None:
        if isinstance(message, Serving):
            worker.serving = True
            if worker in self._monitors:
                self._monitors[worker] = HeartbeatMonitor(LATE_S, self._timeout_s)
            self._callbacks.on_serving(worker)
        elif isinstance(message, Up):
            worker.up, worker.chats = True, message.chats
            self._callbacks.on_up(worker)
            if self._complete:
                log.info("API worker %d takes requests", worker.index)
        elif isinstance(message, Idle):
            worker.idle = True
        elif isinstance(message, WorkerFailed):
            self._on_failed(worker, message)
        else:
            self._callbacks.on_message(worker, message)
        self._changed.set()

    def _on_failed(self, worker: WorkerProcess, failed: WorkerFailed) -> None:
        if self._complete:
            log.error("API worker %d cannot start: %s", worker.index, failed.error.message)
            worker.send(Stop())
        elif not self._stopping.is_set():
            error = failed.error.as_error()
            self._fail(error or WorkersDiedError(f"an API worker cannot start: {failed.error.message}"))


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
