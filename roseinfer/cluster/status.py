"""Status of an engine, as its supervisor publishes it, and readers of status and promises."""

from typing import NamedTuple, Protocol

from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineState


class EngineStatus(NamedTuple):
    """Status of an engine. `number`: of its present process, counted from 1; 0 = none yet. `final`: it was given up.

    `host_lost`: nothing is received from its supervisor either, so its host or the network has failed; the other fields
    are the last that were received. `pid`: of its present process on this host; 0 = none, or on another host.
    """

    state: EngineState = EngineState.STARTING
    number: int = 0
    final: bool = False
    host_lost: bool = False
    pid: int = 0


class StatusReader(Protocol):
    """Source of engines' promises and statuses, by their numbers. No call waits."""

    def write_count(self, engine: int) -> int:
        """Return how often the promise has been written: it changes as long as the engine makes steps."""
        ...

    def promise(self, engine: int) -> Promise | None:
        """Return the newest promise, its times on the clock of this process; None if there is none."""
        ...

    def status(self, engine: int) -> EngineStatus: ...

    def close(self) -> None: ...
