"""Client-side record of one engine: its connection, across restarts of its process."""

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
from roseinfer.processes.ending import is_ending

log = logging.getLogger(__name__)

# Delay after a failed connection attempt: at first, and at most.
MIN_RETRY_S = 0.02
MAX_RETRY_S = 0.5
# Delay after an incompatible engine was found: an operator must replace it.
INCOMPATIBLE_RETRY_S = 10.0
# Lower bound on an expected wait.
MIN_WAIT_S = 1.0


def _nothing() -> None: ...


class Connector(NamedTuple):
    """Access to one engine. `connect` makes a new transport; the previous one must be closed. `reader`: source of the
    engine's promises and status. `close`: releases the access.
    """

    connect: Callable[[], Transport]
    reader: StatusReader
    close: Callable[[], None] = _nothing


class Endpoint:
    """One engine of a client. `maintain_connection` connects, and reconnects whenever the connection is lost.

    `make_client` makes a client of a transport. `incompatibility` returns why an engine cannot serve our requests, or
    None.

    `engine`: client of a running process, or None without a connection. `draining`, `quiet`: as of the last `refresh`.
    `listed`: the directory lists the engine; otherwise it is used only as long as it can be reached.
    `retire_deadline_s`: time until which requests may stay on an engine that retires; None if it does not retire.
    """

    def __init__(
        self,
        number: int,
        connector: Connector,
        make_client: Callable[[Transport], AsyncEngine],
        clock: Clock,
        incompatibility: Callable[[EngineInfo], str | None] = lambda info: None,
    ) -> None:
        self.number = number
        self.engine: AsyncEngine | None = None
        self.info: EngineInfo | None = None
        self.draining = self.quiet = False
        self.up = asyncio.Event()
        self._connector = connector
        self._make_client = make_client
        self._newest_connection: AsyncEngine | None = None  # also after it failed
        self.reader = connector.reader
        self._clock = clock
        self._incompatibility = incompatibility
        self.listed = True
        self.retire_deadline_s: float | None = None
        self._lost = asyncio.Event()
        self._seen_writes = -1  # write count of its row at the last `refresh`
        self._status = EngineStatus()
        self._reports_draining = False  # it has reported that it accepts no more requests
        self._process = -1  # number of the connected process
        self._ending = False  # that process was seen to end, although the connection is still there
        self._lost_since_s = clock.now()
        self._process_stats = SchedulerStats()
        self._past_stats = SchedulerStats()  # counts of earlier processes
        self._death: str | None = None
        self._incompatible: str | None = None

    @property
    def accepts_requests(self) -> bool:
        """True if requests may be sent to it."""
        return self.usable and not self.draining and not self.quiet

    @property
    def host_lost(self) -> bool:
        """True if neither the engine nor its supervisor can be reached, as of the last `refresh`. A request is not the
        cause.
        """
        return self._status.host_lost

    @property
    def usable(self) -> bool:
        """True if it could serve a request if no other can. Its process or its supervisor may show its end before the
        connection does.
        """
        return self.engine is not None and not self._ending and self._status.state is not EngineState.DEAD

    @property
    def retiring(self) -> bool:
        return self.retire_deadline_s is not None

    @property
    def must_empty(self) -> bool:
        """True if it retires and its remaining requests must move."""
        return self._clock.now() >= (inf if self.retire_deadline_s is None else self.retire_deadline_s)

    def retire(self, timeout_s: float) -> None:
        """Send it no more requests, for good. Those it has may stay for `timeout_s` seconds."""
        if self.retire_deadline_s is None:
            self.retire_deadline_s = self._clock.now() + timeout_s
        self.draining = True

    # --- the connection -----------------------------------------------------------------------------------------
    async def maintain_connection(self, on_up: Callable[["Endpoint", bool], None]) -> None:
        """Connect and reconnect until cancelled. Call `on_up` for each connection, with True if the process is a new
        one.
        """
        wait_s = MIN_RETRY_S
        while True:
            if await self.reach(on_up):
                wait_s = MIN_RETRY_S
                await self._lost.wait()
            await asyncio.sleep(INCOMPATIBLE_RETRY_S if self._incompatible else wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    async def reach(self, on_up: Callable[["Endpoint", bool], None]) -> bool:
        """Close the previous connection and try to connect. Wait for an engine that is starting."""
        if self._newest_connection is not None:
            await self._newest_connection.close()
        engine = self._newest_connection = self._make_client(self._connector.connect())
        try:
            await engine.connect()
        except RoseinferError as error:
            log.debug("cannot reach engine %d: %s", self.number, error)
            return False
        except Exception:
            log.exception("cannot reach engine %d", self.number)
            return False
        if not engine.health().alive:  # it has ended since it reported that it is ready
            return False
        if not await self._is_compatible(engine):
            return False
        self._set_connected(engine, on_up)
        return True

    async def _is_compatible(self, engine: AsyncEngine) -> bool:
        reason = self._incompatibility(engine.info)
        if reason is not None:
            if reason != self._incompatible:  # logged once
                log.error("cannot use engine %d: %s", self.number, reason)
            await engine.close()
        self._incompatible = self._death = reason
        return reason is None

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
            self._seen_writes = -1  # promises written before the connection are new for the new process
        self._process = process
        self._ending = False
        self._lost.clear()
        self.engine, self.info, self._death = engine, engine.info, None
        self.up.set()
        on_up(self, another)

    def set_lost(self, reason: str) -> None:
        """Record that the connection has ended."""
        assert self.engine is not None
        self._process_stats = self.engine.stats()._replace(running=0, waiting=0, blocks_used=0)
        self.engine, self._death = None, reason
        self._lost_since_s = self._clock.now()
        self.up.clear()
        self._lost.set()

    # --- promises and status -------------------------------------------------------------------------------------
    def refresh(self) -> Promise | None:
        """Update `draining` and `quiet`. Return the engine's promise if it is new."""
        promise: Promise | None = None
        written = self.reader.write_count(self.number)
        if written != self._seen_writes:
            self._seen_writes = written
            promise = self.reader.promise(self.number)
            self._reports_draining = promise is not None and promise.draining
        self._status = self.reader.status(self.number)
        self.draining = self.retiring or self._reports_draining or self._status.state is EngineState.DRAINING
        self.quiet = self._status.state is EngineState.QUIET
        return promise

    def look_for_end(self) -> None:
        """Note whether the connected process is ending. That needs a look at the process, unlike `refresh`."""
        status = self.reader.status(self.number)
        self._ending = status.pid > 0 and status.number == self._process and is_ending(status.pid)

    # --- reports ------------------------------------------------------------------------------------------------
    def health(self) -> EngineHealth:
        if self.engine is not None:
            return self.engine.health()
        return EngineHealth(False, self._clock.now() - self._lost_since_s, self._death, self._status.final)

    def stats(self) -> SchedulerStats:
        """Return counts that continue over restarts."""
        return carry_counters(self._past_stats, self._process_stats if self.engine is None else self.engine.stats())

    def report(self) -> EngineReport:
        """Return its state as of the last `refresh`."""
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
        """Return the seconds until a starting engine is expected to be up. For a connected one: the whole time of a
        start.
        """
        start_s = 0.0 if self.info is None else self.info.facts.startup_s.get("engine", 0.0)
        gone_s = 0.0 if self.engine is not None else self._clock.now() - self._lost_since_s
        return max(MIN_WAIT_S, start_s - gone_s)
