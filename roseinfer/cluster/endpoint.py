"""The place of one of a server's engines: the way to it, from one of its processes to the next."""

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from roseinfer.cluster.status import EngineStatus, StatusReader
from roseinfer.core.clock import Clock
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import SchedulerStats, carry_counters
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport, EngineState
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.transport import Transport

log = logging.getLogger(__name__)

# How long to wait after an attempt to reach it that failed: at first, and at most.
MIN_RETRY_S = 0.02
MAX_RETRY_S = 0.5
# The same when another sort of engine was found there: who put it there has to put another in its place.
INCOMPATIBLE_RETRY_S = 10.0
# What is said to come back in no time may still take this long, in seconds.
MIN_WAIT_S = 1.0


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
    `incompatibility` says of an engine that is reached what keeps it from taking our requests, or None.

    `engine`: while there is a connection to a process that is up. `draining`, `quiet`: as of the last `look`.
    `listed`: whether it is still named to us; one that is not is of use only while it can be reached.
    `retire_deadline_s`: it retires, and what it has may stay there until then; None: it does not.
    """

    def __init__(
        self,
        number: int,
        way: Connector,
        connection: Callable[[Transport], AsyncEngine],
        clock: Clock,
        incompatibility: Callable[[EngineInfo], str | None] = lambda info: None,
    ) -> None:
        self.number = number
        self.engine: AsyncEngine | None = None
        self.info: EngineInfo | None = None
        self.draining = self.quiet = False
        self.up = asyncio.Event()
        self._connector = way
        self._connection = connection
        self._newest_connection: AsyncEngine | None = None  # the newest connection, whatever became of it
        self.reader = way.reader
        self._clock = clock
        self._incompatibility = incompatibility
        self.listed = True
        self.retire_deadline_s: float | None = None
        self._lost = asyncio.Event()
        self._seen_writes = -1  # how often its row had been written
        self._status = EngineStatus()
        self._says_draining = False  # it has said that it takes no more
        self._process = -1  # which one it is that was reached
        self._lost_since_s = clock.now()
        self._process_stats = SchedulerStats()
        self._past_stats = SchedulerStats()  # counts of the processes that have ended
        self._death: str | None = None
        self._incompatible: str | None = None

    @property
    def accepts_requests(self) -> bool:
        """Whether it may be given requests."""
        return self.usable and not self.draining and not self.quiet

    @property
    def host_lost(self) -> bool:
        """Whether the way to it is lost with all that is known of it, as of the last `look`: no request does that."""
        return self._status.host_lost

    @property
    def usable(self) -> bool:
        """Whether it could be given requests, if it must be. Its owner may know before us that it has ended."""
        return self.engine is not None and self._status.state is not EngineState.DEAD

    @property
    def retiring(self) -> bool:
        return self.retire_deadline_s is not None

    @property
    def must_empty(self) -> bool:
        """Whether it retires, and what it has is to go elsewhere."""
        return self._clock.now() >= (inf if self.retire_deadline_s is None else self.retire_deadline_s)

    def retire(self, patience_s: float) -> None:
        """It is to get no more requests; those it has may stay for so many seconds. There is no way back."""
        if self.retire_deadline_s is None:
            self.retire_deadline_s = self._clock.now() + patience_s
        self.draining = True

    # --- the connection -----------------------------------------------------------------------------------------
    async def maintain_connection(self, on_up: Callable[["Endpoint", bool], None]) -> None:
        """Runs until cancelled. `on_up` is told of each connection, and whether it leads to another process than the
        one before.
        """
        wait_s = MIN_RETRY_S
        while True:
            if await self.reach(on_up):
                wait_s = MIN_RETRY_S
                await self._lost.wait()
            await asyncio.sleep(INCOMPATIBLE_RETRY_S if self._incompatible else wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    async def reach(self, on_up: Callable[["Endpoint", bool], None]) -> bool:
        """One attempt to connect; waits for an engine that is starting. The connection before is closed."""
        if self._newest_connection is not None:
            await self._newest_connection.close()
        engine = self._newest_connection = self._connection(self._connector.connect())
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
        if not await self._is_compatible(engine):
            return False
        self._set_connected(engine, on_up)
        return True

    async def _is_compatible(self, engine: AsyncEngine) -> bool:
        unfit = self._incompatibility(engine.info)
        if unfit is not None:
            if unfit != self._incompatible:  # said once
                log.error("engine %d is not used: %s", self.number, unfit)
            await engine.close()
        self._incompatible = self._death = unfit
        return unfit is None

    async def close(self) -> None:
        if self._newest_connection is not None:
            await self._newest_connection.close()
        self._connector.close()

    def _set_connected(self, engine: AsyncEngine, on_up: Callable[["Endpoint", bool], None]) -> None:
        process = self.reader.status(self.number).number
        another = process != self._process
        if another:
            self._past_stats = carry_counters(self._past_stats, self._process_stats)
            self._process_stats = SchedulerStats()
            self._seen_writes = (
                -1
            )  # what it has published before we reached it is new to whoever forgets the one before
        self._process = process
        self._lost.clear()
        self.engine, self.info, self._death = engine, engine.info, None
        self.up.set()
        on_up(self, another)

    def set_lost(self, reason: str) -> None:
        """The connection has ended."""
        assert self.engine is not None
        self._process_stats = self.engine.stats()._replace(running=0, waiting=0, blocks_used=0)
        self.engine, self._death = None, reason
        self._lost_since_s = self._clock.now()
        self.up.clear()
        self._lost.set()

    # --- what it says unasked ------------------------------------------------------------------------------------
    def refresh(self) -> Promise | None:
        """Sets `draining` and `quiet`. Returns a promise that was not there the last time."""
        promise: Promise | None = None
        written = self.reader.write_count(self.number)
        if written != self._seen_writes:
            self._seen_writes = written
            promise = self.reader.promise(self.number)
            self._says_draining = promise is not None and promise.draining
        self._status = self.reader.status(self.number)
        self.draining = self.retiring or self._says_draining or self._status.state is EngineState.DRAINING
        self.quiet = self._status.state is EngineState.QUIET
        return promise

    # --- reports ------------------------------------------------------------------------------------------------
    def health(self) -> EngineHealth:
        if self.engine is not None:
            return self.engine.health()
        return EngineHealth(False, self._clock.now() - self._lost_since_s, self._death, self._status.final)

    def stats(self) -> SchedulerStats:
        """Counts go on over restarts."""
        return carry_counters(self._past_stats, self._process_stats if self.engine is None else self.engine.stats())

    def report(self) -> EngineReport:
        """As of the last `look`."""
        return EngineReport(
            self.number,
            self._state(),
            self.health(),
            self.stats(),
            restarts=max(0, self._status.number - 1),
            info=self.info,
            promise=self.reader.promise(self.number) if self.engine is not None else None,
        )

    def _state(self) -> EngineState:
        if self.engine is not None:
            if self.quiet:
                return EngineState.QUIET
            return EngineState.DRAINING if self.draining else EngineState.READY
        return EngineState.STARTING if self._status.state is EngineState.STARTING else EngineState.DEAD

    def expected_wait_s(self) -> float:
        """Seconds until it is expected to be there, if it is on its way. One that is about to go has all before it."""
        start_s = 0.0 if self.info is None else self.info.facts.startup_s.get("engine", 0.0)
        gone_s = 0.0 if self.engine is not None else self._clock.now() - self._lost_since_s
        return max(MIN_WAIT_S, start_s - gone_s)
