"""Clocks that are passed in, so that tests and the simulator control time."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return seconds on a monotonic scale that all processes of one machine share."""
        ...


class MonotonicClock:
    now = staticmethod(time.monotonic)  # no Python call in between: a step reads the clock some ten times


class AdvancingClock(Clock, Protocol):
    """Clock that can also wait."""

    def advance(self, seconds: float) -> None:
        """Let at least `seconds` pass."""
        ...


class SleepingClock(MonotonicClock):
    """Real time; `advance` sleeps."""

    advance = staticmethod(time.sleep)


class ManualClock:
    """Clock that moves only by `advance`."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"cannot advance a clock by {seconds} s (must not be negative)")
        self._now += seconds
