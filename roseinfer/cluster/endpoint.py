"""The place of one of a server's engines: the way to it, from one of its processes to the next."""

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from roseinfer.cluster.status import EngineStatus, StatusReader
from roseinfer.core.clock import Clock
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import SchedulerStats, continued
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport, EngineState
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.transport import Transport

log = logging.getLogger(__name__)

# How long to wait after an attempt to reach it that failed: at first, and at most.
FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 0.5
# The same when another sort of engine was found there: who put it there has to put another in its place.
MISFIT_WAIT_S = 10.0
# What is said to come back in no time may still take this long, in seconds.
SHORTEST_ABSENCE_S = 1.0


def _nothing() -> None: ...


class Connector(NamedTuple):
    """The way to one engine. `connect` makes a new connection each time: the one before is closed by then. `reader`
    tells what it promises. `close`: once it is not needed any more.
    """

    connect: Callable[[], Transport]
    reader: StatusReader
    close: Callable[[], None] = _nothing


class Endpoint:
    """`keep` connects, and again whenever the engine is lost. What is known of it beside comes from the way's reader.
    `connection` makes an engine's client of a transport.
    `misfit` says of an engine that is reached what keeps it from taking our requests, or None.

    `engine`: while there is a connection to a process that is up. `draining`, `quiet`: as of the last `look`.
    `listed`: whether it is still named to us; one that is not is of use only while it can be reached.
    `patience_ends_s`: it retires, and what it has may stay there until then; None: it does not.
    """

    def __init__(
        self,
        number: int,
        way: Connector,
        connection: Callable[[Transport], AsyncEngine],
        clock: Clock,
        misfit: Callable[[EngineInfo], str | None] = lambda info: None,
    ) -> None:
        self.number = number
        self.engine: AsyncEngine | None = None
        self.info: EngineInfo | None = None
        self.draining = self.quiet = False
        self.up = asyncio.Event()
        self._way = way
        self._connection = connection
        self._last: AsyncEngine | None = None  # the newest connection, whatever became of it
        self._reader = way.reader
        self._clock = clock
        self._misfit = misfit
        self.listed = True
        self.patience_ends_s: float | None = None
        self._gone = asyncio.Event()
        self._seen = -1  # how often its row had been written
        self._standing = EngineStatus()
        self._ends = False  # it has said that it takes no more
        self._process = -1  # which one it is that was reached
        self._away_since_s = clock.now()
        self._newest = SchedulerStats()
        self._ended = SchedulerStats()  # counts of the processes that have ended
        self._death: str | None = None
        self._unfit: str | None = None

    @property
    def takes(self) -> bool:
        """Whether it may be given requests."""
        return self.there and not self.draining and not self.quiet

    @property
    def cut_off(self) -> bool:
        """Whether the way to it is lost with all that is known of it, as of the last `look`: no request does that."""
        return self._standing.cut_off

    @property
    def there(self) -> bool:
        """Whether it could be given requests, if it must be. Its owner may know before us that it has ended."""
        return self.engine is not None and self._standing.state is not EngineState.DEAD

    @property
    def retires(self) -> bool:
        return self.patience_ends_s is not None

    @property
    def spent(self) -> bool:
        """Whether it retires, and what it has is to go elsewhere."""
        return self._clock.now() >= (inf if self.patience_ends_s is None else self.patience_ends_s)

    def retire(self, patience_s: float) -> None:
        """It is to get no more requests; those it has may stay for so many seconds. There is no way back."""
        if self.patience_ends_s is None:
            self.patience_ends_s = self._clock.now() + patience_s
        self.draining = True

    # --- the connection -----------------------------------------------------------------------------------------
    async def keep(self, on_up: Callable[["Endpoint", bool], None]) -> None:
        """Runs until cancelled. `on_up` is told of each connection, and whether it leads to another process than the
        one before.
        """
        wait_s = FIRST_WAIT_S
        while True:
            if await self.reach(on_up):
                wait_s = FIRST_WAIT_S
                await self._gone.wait()
            await asyncio.sleep(MISFIT_WAIT_S if self._unfit else wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def reach(self, on_up: Callable[["Endpoint", bool], None]) -> bool:
        """One attempt to connect; waits for an engine that is starting. The connection before is closed."""
        if self._last is not None:
            await self._last.close()
        engine = self._last = self._connection(self._way.connect())
        try:
            await engine.connect()
        except RoseinferError as error:
            log.debug("engine %d is not there: %s", self.number, error)
            return False
        except Exception:
            log.exception("engine %d cannot be reached", self.number)
            return False
        if not engine.health().alive:  # it has died since it said that it is ready
            return False
        if not await self._fits(engine):
            return False
        self._rise(engine, on_up)
        return True

    async def _fits(self, engine: AsyncEngine) -> bool:
        unfit = self._misfit(engine.info)
        if unfit is not None:
            if unfit != self._unfit:  # said once
                log.error("engine %d is not used: %s", self.number, unfit)
            await engine.close()
        self._unfit = self._death = unfit
        return unfit is None

    async def close(self) -> None:
        if self._last is not None:
            await self._last.close()
        self._way.close()

    def _rise(self, engine: AsyncEngine, on_up: Callable[["Endpoint", bool], None]) -> None:
        process = self._reader.standing(self.number).number
        another = process != self._process
        if another:
            self._ended = continued(self._ended, self._newest)
            self._newest = SchedulerStats()
            self._seen = -1  # what it has published before we reached it is new to whoever forgets the one before
        self._process = process
        self._gone.clear()
        self.engine, self.info, self._death = engine, engine.info, None
        self.up.set()
        on_up(self, another)

    def lose(self, reason: str) -> None:
        """The connection has ended."""
        assert self.engine is not None
        self._newest = self.engine.stats()._replace(running=0, waiting=0, blocks_used=0)
        self.engine, self._death = None, reason
        self._away_since_s = self._clock.now()
        self.up.clear()
        self._gone.set()

    # --- what it says unasked ------------------------------------------------------------------------------------
    def look(self) -> Promise | None:
        """Sets `draining` and `quiet`. Returns a promise that was not there the last time."""
        promise: Promise | None = None
        written = self._reader.written(self.number)
        if written != self._seen:
            self._seen = written
            promise = self._reader.read(self.number)
            self._ends = promise is not None and promise.draining
        self._standing = self._reader.standing(self.number)
        self.draining = self.retires or self._ends or self._standing.state is EngineState.DRAINING
        self.quiet = self._standing.state is EngineState.QUIET
        return promise

    # --- reports ------------------------------------------------------------------------------------------------
    def health(self) -> EngineHealth:
        if self.engine is not None:
            return self.engine.health()
        return EngineHealth(False, self._clock.now() - self._away_since_s, self._death, self._standing.final)

    def stats(self) -> SchedulerStats:
        """Counts go on over restarts."""
        return continued(self._ended, self._newest if self.engine is None else self.engine.stats())

    def report(self) -> EngineReport:
        """As of the last `look`."""
        return EngineReport(
            self.number,
            self._state(),
            self.health(),
            self.stats(),
            restarts=max(0, self._standing.number - 1),
            info=self.info,
            promise=self._reader.read(self.number) if self.engine is not None else None,
        )

    def _state(self) -> EngineState:
        if self.engine is not None:
            if self.quiet:
                return EngineState.QUIET
            return EngineState.DRAINING if self.draining else EngineState.READY
        return EngineState.STARTING if self._standing.state is EngineState.STARTING else EngineState.DEAD

    def absence_s(self) -> float:
        """Seconds until it is expected to be there, if it is on its way. One that is about to go has all before it."""
        start_s = 0.0 if self.info is None else self.info.startup_s.get("engine", 0.0)
        gone_s = 0.0 if self.engine is not None else self._clock.now() - self._away_since_s
        return max(SHORTEST_ABSENCE_S, start_s - gone_s)
