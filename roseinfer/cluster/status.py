"""What is known of an engine beside what it answers: its newest promise, and what its owner says of it."""

from typing import NamedTuple, Protocol

from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineState


class EngineStatus(NamedTuple):
    """What the owner says of an engine. `number`: how many processes it has been, this one included; 0 = none yet.
    `final`: it is not started again. `host_lost`: the owner is not heard either, so that something between here and its
    host is the matter, or all of the host; state and number are then as they were heard last.
    """

    state: EngineState = EngineState.STARTING
    number: int = 0
    final: bool = False
    host_lost: bool = False


class StatusReader(Protocol):
    """Where engines' promises and statuses are read, by their numbers. No call waits."""

    def write_count(self, engine: int) -> int:
        """How often the promise has been written: it moves as long as the engine makes steps."""
        ...

    def promise(self, engine: int) -> Promise | None:
        """The newest promise, its times on the clock of this process; None: there is none."""
        ...

    def status(self, engine: int) -> EngineStatus: ...

    def close(self) -> None: ...
