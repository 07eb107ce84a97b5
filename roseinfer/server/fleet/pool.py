"""The worker processes of a server: started, watched, replaced when they die, stopped."""

import asyncio
import itertools
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from roseinfer.core import errors
from roseinfer.core.clock import Clock
from roseinfer.core.errors import RoseinferError
from roseinfer.server.fleet.control import (
    Broken,
    ControlChannel,
    FromManager,
    FromWorker,
    Idle,
    Serving,
    Stop,
    Up,
    WorkerBoot,
)

log = logging.getLogger(__name__)

# So many workers may die within so many seconds before the server gives up.
MAX_DEATHS, DEATHS_WINDOW_S = 5, 60.0
# How long a worker may take to end when it was told to.
STOP_PATIENCE_S = 8.0


class WorkersDiedError(RoseinferError):
    """API workers die as fast as they are replaced."""


class WorkerProcess:
    """A worker as the manager sees it."""

    def __init__(self, index: int, number: int, connections: socket.socket) -> None:
        self.index = index
        self.number = number
        self.connections = connections
        self.process: asyncio.subprocess.Process
        self.channel: ControlChannel[FromManager, FromWorker]
        self.up = False
        self.idle = False

    def send(self, message: FromManager) -> None:
        self.channel.send(message)


class Listener(Protocol):
    """Who is told of what happens to the workers."""

    def serving(self, worker: WorkerProcess) -> None:
        """It takes connections."""
        ...

    def received(self, worker: WorkerProcess, message: FromWorker) -> None: ...

    def gone(self, worker: WorkerProcess) -> None:
        """Its process has ended."""
        ...


class WorkerPool:
    """`boot(index, number, control, connections)` is what a new worker is told; it inherits `counters` too.

    A worker that dies is replaced while `replacing()` says so. `failure` is set to an exception when there is no going
    on: a worker says that it is broken before all have been up, too many die, or the last one and is not replaced.
    """

    def __init__(
        self,
        size: int,
        boot: Callable[[int, int, int, int], WorkerBoot],
        counters: int,
        listener: Listener,
        replacing: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self.workers: dict[int, WorkerProcess] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._size = size
        self._boot = boot
        self._counters = counters
        self._listener = listener
        self._replacing = replacing
        self._clock = clock
        self._numbers = itertools.count(1)
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._watches: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._complete = False
        self._leaving = False

    async def start(self) -> None:
        """Start all workers and wait until they are up."""
        for index in range(self._size):
            await self._start_worker(index)
        await self._until(lambda: len(self.workers) == self._size and all(w.up for w in self.workers.values()))
        self._complete = True

    async def idle(self) -> None:
        """Returns when no worker has a request left; they have been told to take no more."""
        await self._until(lambda: all(worker.idle for worker in self.workers.values()))

    async def stop(self) -> None:
        """Have all workers end, those that do not by force."""
        self._leaving = True
        self.send(Stop())
        if self._watches:
            await asyncio.wait(self._watches, timeout=STOP_PATIENCE_S)
        for worker in self.workers.values():
            log.warning("API worker %d does not end by itself: killing it", worker.index)
            worker.process.kill()
        await asyncio.gather(*self._watches)

    def send(self, message: FromManager) -> None:
        """To all of them."""
        for worker in self.workers.values():
            worker.send(message)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # --- coming and going ---------------------------------------------------------------------------------------
    async def _start_worker(self, index: int) -> None:
        (control, its_control), (connections, its_connections) = socket.socketpair(), socket.socketpair()
        connections.setblocking(False)
        worker = WorkerProcess(index, next(self._numbers), connections)
        with its_control, its_connections:
            ends = (its_control.fileno(), its_connections.fileno())
            worker.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "roseinfer.server.fleet.worker",
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(*ends, self._counters),
            )
        assert worker.process.stdin is not None
        # The pipe stays open: its end tells the worker that we are gone.
        worker.process.stdin.write(msgspec.json.encode(self._boot(index, worker.number, *ends)) + b"\n")
        worker.channel = ControlChannel(FromWorker, partial(self._on_message, worker), lambda: None)
        await worker.channel.open(control)
        self.workers[index] = worker
        if self._leaving:
            worker.send(Stop())
        watch = asyncio.create_task(self._watch(worker))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, worker: WorkerProcess) -> None:
        code = await worker.process.wait()
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.channel.close()
        worker.connections.close()
        del self.workers[worker.index]
        self._listener.gone(worker)
        self._changed.set()
        if self._replacing():
            log.error(
                "API worker %d ended with code %s; its requests are lost, another takes its place", worker.index, code
            )
            await self._replace(worker)
        elif not self.workers and not self._leaving:
            self._fail(WorkersDiedError("the last API worker has died"))

    async def _replace(self, worker: WorkerProcess) -> None:
        now_s = self._clock.now()
        self._deaths.append(now_s)
        if len(self._deaths) == MAX_DEATHS and now_s - self._deaths[0] <= DEATHS_WINDOW_S:
            message = f"{MAX_DEATHS} API workers have died within {DEATHS_WINDOW_S:g} seconds"
            self._fail(WorkersDiedError(message))
            return
        await self._start_worker(worker.index)

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    # --- what they say ------------------------------------------------------------------------------------------
    def _on_message(self, worker: WorkerProcess, message: FromWorker) -> None:
        if isinstance(message, Serving):
            self._listener.serving(worker)
        elif isinstance(message, Up):
            worker.up = True
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
        elif not self._leaving:
            self._fail(_typed(message))


def _typed(message: Broken) -> Exception:
    kind = getattr(errors, message.error, None)
    if isinstance(kind, type) and issubclass(kind, RoseinferError):
        return kind(message.message)
    return WorkersDiedError(f"an API worker cannot start: {message.message}")
