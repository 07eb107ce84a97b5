"""The workers of a server: hired, watched, replaced when they die, sent away."""

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
    FromManager,
    FromWorker,
    Idle,
    Serving,
    Stop,
    Talk,
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


class Member:
    """A worker as the manager sees it."""

    def __init__(self, index: int, number: int, connections: socket.socket) -> None:
        self.index = index
        self.number = number
        self.connections = connections
        self.process: asyncio.subprocess.Process
        self.talk: Talk[FromManager, FromWorker]
        self.up = False
        self.idle = False

    def say(self, message: FromManager) -> None:
        self.talk.say(message)


class Listener(Protocol):
    """Who is told of what happens to the workers."""

    def serving(self, member: Member) -> None:
        """It takes connections."""
        ...

    def said(self, member: Member, message: FromWorker) -> None: ...

    def gone(self, member: Member) -> None:
        """Its process has ended."""
        ...


class Crew:
    """`boot(index, number, control, connections)` is what a new worker is told; it inherits `board` too.

    A worker that dies is replaced while `replacing()` says so. `failure` is set to an exception when there is no going
    on: a worker says that it is broken before all have been up, too many die, or the last one and is not replaced.
    """

    def __init__(
        self,
        size: int,
        boot: Callable[[int, int, int, int], WorkerBoot],
        board: int,
        listener: Listener,
        replacing: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self.members: dict[int, Member] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._size = size
        self._boot = boot
        self._board = board
        self._listener = listener
        self._replacing = replacing
        self._clock = clock
        self._numbers = itertools.count(1)
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._watches: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._complete = False
        self._leaving = False

    async def assemble(self) -> None:
        """Start all workers and wait until they are up."""
        for index in range(self._size):
            await self._hire(index)
        await self._until(lambda: len(self.members) == self._size and all(m.up for m in self.members.values()))
        self._complete = True

    async def idle(self) -> None:
        """Returns when no worker has a request left; they have been told to take no more."""
        await self._until(lambda: all(member.idle for member in self.members.values()))

    async def dismiss(self) -> None:
        """Have all workers end, those that do not by force."""
        self._leaving = True
        self.say(Stop())
        if self._watches:
            await asyncio.wait(self._watches, timeout=STOP_PATIENCE_S)
        for member in self.members.values():
            log.warning("API worker %d does not end by itself: killing it", member.index)
            member.process.kill()
        await asyncio.gather(*self._watches)

    def say(self, message: FromManager) -> None:
        """To all of them."""
        for member in self.members.values():
            member.say(message)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # --- coming and going ---------------------------------------------------------------------------------------
    async def _hire(self, index: int) -> None:
        (control, its_control), (connections, its_connections) = socket.socketpair(), socket.socketpair()
        connections.setblocking(False)
        member = Member(index, next(self._numbers), connections)
        with its_control, its_connections:
            ends = (its_control.fileno(), its_connections.fileno())
            member.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "roseinfer.server.fleet.worker",
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(*ends, self._board),
            )
        assert member.process.stdin is not None
        # The pipe stays open: its end tells the worker that we are gone.
        member.process.stdin.write(msgspec.json.encode(self._boot(index, member.number, *ends)) + b"\n")
        member.talk = Talk(FromWorker, partial(self._on_message, member), lambda: None)
        await member.talk.open(control)
        self.members[index] = member
        if self._leaving:
            member.say(Stop())
        watch = asyncio.create_task(self._watch(member))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, member: Member) -> None:
        code = await member.process.wait()
        assert member.process.stdin is not None
        member.process.stdin.close()
        member.talk.close()
        member.connections.close()
        del self.members[member.index]
        self._listener.gone(member)
        self._changed.set()
        if self._replacing():
            log.error(
                "API worker %d ended with code %s; its requests are lost, another takes its place", member.index, code
            )
            await self._replace(member)
        elif not self.members and not self._leaving:
            self._fail(WorkersDiedError("the last API worker has died"))

    async def _replace(self, member: Member) -> None:
        now_s = self._clock.now()
        self._deaths.append(now_s)
        if len(self._deaths) == MAX_DEATHS and now_s - self._deaths[0] <= DEATHS_WINDOW_S:
            message = f"{MAX_DEATHS} API workers have died within {DEATHS_WINDOW_S:g} seconds"
            self._fail(WorkersDiedError(message))
            return
        await self._hire(member.index)

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    # --- what they say ------------------------------------------------------------------------------------------
    def _on_message(self, member: Member, message: FromWorker) -> None:
        if isinstance(message, Serving):
            self._listener.serving(member)
        elif isinstance(message, Up):
            member.up = True
        elif isinstance(message, Idle):
            member.idle = True
        elif isinstance(message, Broken):
            self._on_broken(member, message)
        else:
            self._listener.said(member, message)
        self._changed.set()

    def _on_broken(self, member: Member, message: Broken) -> None:
        log.debug("API worker %d is broken: %s", member.index, message.message)
        if self._complete:
            member.say(Stop())
        elif not self._leaving:
            self._fail(_typed(message))


def _typed(message: Broken) -> Exception:
    kind = getattr(errors, message.error, None)
    if isinstance(kind, type) and issubclass(kind, RoseinferError):
        return kind(message.message)
    return WorkersDiedError(f"an API worker cannot start: {message.message}")
