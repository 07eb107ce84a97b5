"""The place of one of a server's engines: the way to it, from one of its processes to the next."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from roseinfer.core.clock import Clock
from roseinfer.core.errors import EngineDeadError, EngineUnavailableError, RoseinferError
from roseinfer.core.outputs import SchedulerStats, continued
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport, EngineState
from roseinfer.engine.board import Board, Standing
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.live import LiveRequest

log = logging.getLogger(__name__)

# How long to wait after an attempt to reach it that failed: at first, and at most.
FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 0.5
# What is said to come back in no time may still take this long, in seconds.
SHORTEST_ABSENCE_S = 1.0


class EngineSlot:
    """`keep` connects, and again whenever the engine is lost. What is known of it beside comes from the board.

    `engine`: while there is a connection to a process that is up. `draining`, `quiet`: as of the last `look`.
    """

    def __init__(self, number: int, connect: Callable[[], AsyncEngine], board: Board, clock: Clock) -> None:
        self.number = number
        self.engine: AsyncEngine | None = None
        self.info: EngineInfo | None = None
        self.draining = self.quiet = False
        self.up = asyncio.Event()
        self._connect = connect
        self._last: AsyncEngine | None = None  # the newest connection, whatever became of it
        self._board = board
        self._clock = clock
        self._gone = asyncio.Event()
        self._seen = -1  # how often its row had been written
        self._standing = Standing()
        self._ends = False  # it has said that it takes no more
        self._process = -1  # which one it is that was reached
        self._away_since_s = clock.now()
        self._newest = SchedulerStats()
        self._ended = SchedulerStats()  # counts of the processes that have ended
        self._death: str | None = None

    @property
    def takes(self) -> bool:
        """Whether it may be given requests."""
        return self.there and not self.draining and not self.quiet

    @property
    def there(self) -> bool:
        """Whether it could be given requests, if it must be. Its owner may know before us that it has ended."""
        return self.engine is not None and self._standing.state is not EngineState.DEAD

    # --- the connection -----------------------------------------------------------------------------------------
    async def keep(self, on_up: Callable[["EngineSlot", bool], None]) -> None:
        """Runs until cancelled. `on_up` is told of each connection, and whether it leads to another process than the
        one before.
        """
        wait_s = FIRST_WAIT_S
        while True:
            if await self.reach(on_up):
                wait_s = FIRST_WAIT_S
                await self._gone.wait()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def reach(self, on_up: Callable[["EngineSlot", bool], None]) -> bool:
        """One attempt to connect; waits for an engine that is starting. The connection before is closed."""
        if self._last is not None:
            await self._last.close()
        engine = self._last = self._connect()
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
        self._rise(engine, on_up)
        return True

    async def close(self) -> None:
        if self._last is not None:
            await self._last.close()

    def _rise(self, engine: AsyncEngine, on_up: Callable[["EngineSlot", bool], None]) -> None:
        process = self._board.standing(self.number).number
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

    # --- what the board says ------------------------------------------------------------------------------------
    def look(self) -> Promise | None:
        """Sets `draining` and `quiet`. Returns a promise that was not there the last time."""
        promise: Promise | None = None
        written = self._board.written(self.number)
        if written != self._seen:
            self._seen = written
            promise = self._board.read(self.number)
            self._ends = promise is not None and promise.draining
        self._standing = self._board.standing(self.number)
        self.draining = self._ends or self._standing.state is EngineState.DRAINING
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


def no_engine(slots: Sequence[EngineSlot]) -> EngineUnavailableError:
    """None of them takes requests."""
    return EngineUnavailableError("no engine takes requests just now", min(slot.absence_s() for slot in slots))


def homeless(
    live: LiveRequest, slots: Sequence[EngineSlot], reason: str, *, on_purpose: bool = False
) -> RoseinferError:
    """What ends a request whose engine was lost for this reason, with no other to go to. `on_purpose`: the engine was
    to be restarted.
    """
    return EngineDeadError(reason) if live.begun and not on_purpose else no_engine(slots)
