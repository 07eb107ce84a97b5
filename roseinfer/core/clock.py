"""Time as a value that is passed in, so that tests and the simulator can hold it still."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale shared by the processes of one machine."""
        ...


class MonotonicClock:
    now = staticmethod(time.monotonic)  # no call of ours in between: it is asked some ten times a step


class AdvancingClock(Clock, Protocol):
    """A clock with which one can wait."""

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass, or a little more."""
        ...


class SleepingClock(MonotonicClock):
    """Real time: who lets it pass sleeps."""

    advance = staticmethod(time.sleep)


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._now += seconds
