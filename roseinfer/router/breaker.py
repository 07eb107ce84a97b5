"""Whether an engine that fails gets requests: a circuit breaker."""

from enum import Enum
from math import inf

FAULTS = 3  # in a row, without an answer between them
APART_S = 0.1  # faults nearer to each other are one: a step that fails takes all its requests along
OPEN_S, LONGEST_S = 1.0, 30.0  # how long it stays open at first, and at most


class Outcome(Enum):
    """What came of a request, as far as it says something of its engine."""

    ANSWERED = "answered"  # also a refusal of what was asked
    FAULT = "fault"  # the connection broke, nothing came, or the engine failed
    NEUTRAL = "neutral"  # it had no room: that says nothing of its health


class Breaker:
    """Opens after faults in a row. After a while one request is let through (half-open): if it is answered the breaker
    closes, if it fails it stays open for twice as long. One of which nothing is heard gives way to another.
    """

    __slots__ = ("_faults", "_last_s", "_open_s", "_trial_s", "_until_s")

    def __init__(self) -> None:
        self._faults = 0
        self._open_s = OPEN_S
        self._last_s = self._until_s = self._trial_s = -inf

    @property
    def closed(self) -> bool:
        return self._faults < FAULTS

    def admits(self, now_s: float) -> bool:
        """Whether a request may be sent."""
        return self._faults < FAULTS or (now_s >= self._until_s and now_s >= self._trial_s + self._open_s)

    def sent(self, now_s: float) -> None:
        if self._faults >= FAULTS:
            self._trial_s = now_s

    def report(self, outcome: Outcome, now_s: float) -> None:
        if outcome is Outcome.ANSWERED:
            self._faults, self._open_s = 0, OPEN_S
        elif outcome is Outcome.NEUTRAL:
            self._trial_s = -inf
        elif now_s >= self._last_s + APART_S:
            self._fault(now_s)

    def _fault(self, now_s: float) -> None:
        if self._faults >= FAULTS:
            self._open_s = min(LONGEST_S, 2 * self._open_s)
        self._faults += 1
        self._last_s = now_s
        if self._faults >= FAULTS:
            self._until_s, self._trial_s = now_s + self._open_s, -inf
