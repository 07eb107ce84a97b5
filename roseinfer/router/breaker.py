"""Circuit breaker: stops sending requests to an engine that fails."""

from enum import Enum
from math import inf

MAX_FAULTS_COUNT = 3  # consecutive faults that open the breaker
MIN_FAULT_INTERVAL_S = 0.1  # a failed step fails all of its requests: closer faults count once
MIN_OPEN_S, MAX_OPEN_S = 1.0, 30.0


class AttemptOutcome(Enum):
    """Outcome of one attempt to send a request to an engine, as evidence about the engine."""

    ANSWERED = "answered"  # including a rejected invalid request
    FAULT = "fault"  # the connection broke, nothing arrived, or the engine failed
    NEUTRAL = "neutral"  # the engine had no capacity, which is no evidence about its health


class Breaker:
    """Circuit breaker of one engine.

    Consecutive faults open it. When the open time has passed, one trial request is admitted (half-open): an answer
    closes the breaker, a fault doubles the open time. A trial without an outcome expires after the open time.
    """

    __slots__ = ("_faults", "_last_s", "_open_s", "_trial_s", "_until_s")

    def __init__(self) -> None:
        self._faults = 0
        self._open_s = MIN_OPEN_S
        self._last_s = self._until_s = self._trial_s = -inf

    @property
    def closed(self) -> bool:
        return self._faults < MAX_FAULTS_COUNT

    def admits(self, now_s: float) -> bool:
        """Return True if a request may be sent."""
        return self.closed or (now_s >= self._until_s and now_s >= self._trial_s + self._open_s)

    def on_sent(self, now_s: float) -> None:
        if not self.closed:
            self._trial_s = now_s

    def report(self, outcome: AttemptOutcome, now_s: float) -> None:
        if outcome is AttemptOutcome.ANSWERED:
            self._faults, self._open_s = 0, MIN_OPEN_S
        elif outcome is AttemptOutcome.NEUTRAL:
            self._trial_s = -inf
        elif now_s >= self._last_s + MIN_FAULT_INTERVAL_S:
            self._record_fault(now_s)

    def _record_fault(self, now_s: float) -> None:
        if not self.closed:
            self._open_s = min(MAX_OPEN_S, 2 * self._open_s)
        self._faults += 1
        self._last_s = now_s
        if not self.closed:
            self._until_s, self._trial_s = now_s + self._open_s, -inf
