"""What is known of an engine beside what it answers: its newest promise, and what its owner says of it."""

from typing import NamedTuple, Protocol

from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineState


class EngineStatus(NamedTuple):
    """What the owner says of an engine. `number`: how many processes it has been, this one included; 0 = none yet.
    `final`: it is not started again. `cut_off`: the owner is not heard either, so that something between here and its
    host is the matter, or all of the host; state and number are then as they were heard last.
    """

    state: EngineState = EngineState.STARTING
    number: int = 0
    final: bool = False
    cut_off: bool = False


class StatusReader(Protocol):
    """Where engines' promises and standings are read, by their numbers. No call waits."""

    def written(self, engine: int) -> int:
        """How often the promise has been written: it moves as long as the engine makes steps."""
        ...

    def read(self, engine: int) -> Promise | None:
        """The newest promise, its times on the clock of this process; None: there is none."""
        ...

    def standing(self, engine: int) -> EngineStatus: ...

    def close(self) -> None: ...
