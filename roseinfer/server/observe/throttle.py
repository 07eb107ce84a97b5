"""Rate-limited log messages."""

import logging

from roseinfer.core.clock import Clock

INTERVAL_S = 10.0


class ThrottledLog:
    """Log a message at most once in `INTERVAL_S` seconds, with the number of suppressed ones."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._next_s = float("-inf")
        self._left_out = 0

    def error(self, message: str) -> None:
        now_s = self._clock.now()
        if now_s < self._next_s:
            self._left_out += 1
            return
        self._next_s = now_s + INTERVAL_S
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._left_out = 0
        self._log.error("%s%s", message, more)
