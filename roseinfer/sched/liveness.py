"""Detection of policies that stop the engine, as opposed to those that are unfair, slow or idle on purpose."""

import logging
from collections.abc import Collection, Iterable

from roseinfer.core.request import Request

# Consecutive calls of `plan`, with nothing in flight, in which a policy may let no running request compute. The engine
# loop waits 2 ms before each (`IDLE_TURN_WAIT_S`), so a policy may idle on purpose for about 30 ms.
MAX_IDLE_TURNS = 16

log = logging.getLogger(__name__)


class Liveness:
    """Counters of one scheduler with at most `seats` running requests.

    `stalls`: how often the scheduler planned without the policy. `faults`: invalid answers of the policy. Both are
    logged the first, second, fourth, eighth ... time, so that a faulty policy does not fill the disk.

    Between two preemptions requests only progress, and their work is finite. So if steps run and no request gets a
    token, requests preempt each other forever. After two preemptions per seat without a token this is a `livelock`.
    """

    def __init__(self, seats: int) -> None:
        self.stalls = self.faults = 0
        self._preemptions_limit = 2 * seats
        self._preemptions = 0  # since a request last progressed
        self._idle_turns = 0

    @property
    def livelock(self) -> bool:
        return self._preemptions >= self._preemptions_limit

    def preempted(self, policy: object) -> None:
        self._preemptions += 1
        if self._preemptions == self._preemptions_limit:
            self.report_stall(policy, "causes preemption livelock; scheduling the oldest request unconditionally")

    def progressed(self) -> None:
        """Record that some request got a token or ended."""
        self._preemptions = 0

    def rows_planned(self) -> None:
        """Record that a step has rows."""
        self._idle_turns = 0

    def may_idle(self) -> bool:
        """Count a turn without rows; True if the policy may still let no running request compute."""
        self._idle_turns += 1
        return self._idle_turns <= MAX_IDLE_TURNS

    def valid_rows(self, policy: object, chosen: Iterable[Request], running: Collection[Request]) -> Iterable[Request]:
        """Return the requests that the policy chose, without duplicates and requests that do not run."""
        if chosen is running:
            return running
        chosen = list(chosen)
        distinct = set(chosen)
        if len(distinct) == len(chosen) and distinct.issubset(running):
            return chosen
        self.report_fault(policy, "selected a request twice or one that is not running")
        known = set(running)
        return [request for request in dict.fromkeys(chosen) if request in known]

    def report_stall(self, policy: object, how: str) -> None:
        self.stalls += 1
        _warn(policy, how, self.stalls)

    def report_fault(self, policy: object, what: str) -> None:
        self.faults += 1
        _warn(policy, what, self.faults)


def _warn(policy: object, what: str, times: int) -> None:
    if times & (times - 1) == 0:
        log.warning("scheduling policy %s %s (%d times so far)", type(policy).__name__, what, times)
