"""What tells a policy that stops the engine from one that is unfair, slow, or waits for a moment on purpose."""

import logging
from collections.abc import Collection, Iterable

from roseinfer.core.request import Request

# Calls of `plan` in a row, with nothing in flight, in which a policy may let none of those that run compute. The loop
# of the engine waits 2 ms before each (`IDLE_TURN_WAIT_S`): a policy that waits for a moment on purpose has some 30 ms.
HELD_BACK_TURNS = 16

log = logging.getLogger(__name__)


class Liveness:
    """Counts for one scheduler of at most `seats` running requests.

    `stalls`: how often the scheduler went on without the policy. `faults`: answers of the policy that made no sense.
    Both are logged the first, second, fourth, eighth ... time, so that a policy that always does so fills no disk.

    Between two preemptions requests only get further, and what they have computed is finite. So if no request ever gets
    a token again although steps are made, requests take each other's blocks for ever: after two preemptions a seat
    without a token they are `thrashing`.
    """

    def __init__(self, seats: int) -> None:
        self.stalls = self.faults = 0
        self._fruitless_limit = 2 * seats
        self._fruitless = self._held_back = 0

    @property
    def thrashing(self) -> bool:
        return self._fruitless >= self._fruitless_limit

    def preempted(self, policy: object) -> None:
        self._fruitless += 1
        if self._fruitless == self._fruitless_limit:
            self.stalled(policy, "lets requests take each other's blocks; the oldest goes on without it")

    def got_further(self) -> None:
        """Some request got a token, or ended."""
        self._fruitless = 0

    def planned(self) -> None:
        """A step is not empty."""
        self._held_back = 0

    def may_hold_back(self) -> bool:
        """Whether the policy may let none of those that run compute once more."""
        self._held_back += 1
        return self._held_back <= HELD_BACK_TURNS

    def rows(self, policy: object, chosen: Iterable[Request], running: Collection[Request]) -> Iterable[Request]:
        """Who computes, as the policy says: each once, and only who runs."""
        if chosen is running:
            return running
        chosen = list(chosen)
        distinct = set(chosen)
        if len(distinct) == len(chosen) and distinct.issubset(running):
            return chosen
        self.fault(policy, "named rows twice, or of requests that do not run")
        known = set(running)
        return [request for request in dict.fromkeys(chosen) if request in known]

    def stalled(self, policy: object, how: str) -> None:
        self.stalls += 1
        _complain(policy, how, self.stalls)

    def fault(self, policy: object, what: str) -> None:
        self.faults += 1
        _complain(policy, what, self.faults)


def _complain(policy: object, what: str, times: int) -> None:
    if times & (times - 1) == 0:
        log.warning("scheduling policy %s %s (%d times so far)", type(policy).__name__, what, times)
