"""When processes that compute steps collect their garbage: not while a step waits for it."""

import gc

from roseinfer.core.clock import Clock

# Cycles are rare (what a step makes is freed by reference counts), so under a steady load it can wait this long.
BUSY_PATIENCE_S = 30.0


class IdleGarbageCollector:
    """Turns the interpreter's own garbage collection off and does it at better times. One per process.

    After start-up a process with torch holds some hundred thousand objects that live as long as it does. Python
    would walk through all of them whenever enough requests have been added, for 50 to 100 ms in the middle of a
    step; frozen, they are never looked at again. What is made later is little, so collecting it takes a millisecond
    or two, and the loop has that when it is idle.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._worked = False
        self._last_s = clock.now()
        gc.collect()
        gc.freeze()
        gc.disable()

    def busy(self) -> None:
        """To be called after each step."""
        self._worked = True
        if self._clock.now() - self._last_s >= BUSY_PATIENCE_S:
            self._collect()

    def idle(self) -> None:
        """To be called when there is nothing else to do."""
        if self._worked:
            self._collect()

    def _collect(self) -> None:
        gc.collect()
        self._worked = False
        self._last_s = self._clock.now()
