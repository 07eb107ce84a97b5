"""Garbage collection between steps instead of within them."""

import gc

from roseinfer.core.clock import Clock

# Cycles are rare, as reference counts free what a step makes, so a busy engine collects only this often.
MAX_COLLECTION_INTERVAL_S = 30.0


class IdleGarbageCollector:
    """Replacement of the interpreter's automatic garbage collection. One per process.

    After start-up a process with torch holds several hundred thousand permanent objects. The interpreter would scan all
    of them in the middle of a step, for 50 to 100 ms. They are frozen here and never scanned again. Collecting later
    objects takes a millisecond or two, while the loop is idle.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._worked = False
        self._last_s = clock.now()
        gc.collect()
        gc.freeze()
        gc.disable()

    def busy(self) -> None:
        """Notify after each step; collects if the last collection is long ago."""
        self._worked = True
        if self._clock.now() - self._last_s >= MAX_COLLECTION_INTERVAL_S:
            self.collect()

    def idle(self) -> None:
        """Collect if steps ran since the last collection. Call it when there is nothing else to do."""
        if self._worked:
            self.collect()

    def collect(self) -> None:
        gc.collect()
        self._worked = False
        self._last_s = self._clock.now()
