"""Audit of the scheduler's state while the engine has nothing else to do."""

import logging
from collections.abc import Iterator

from roseinfer.core.clock import Clock
from roseinfer.sched.scheduler import Scheduler

log = logging.getLogger(__name__)

# Pauses between the requests of one client are mostly shorter.
IDLE_S = 1.0


class IdleAudit:
    """Audit of seats, queues and KV blocks, once after each time that the engine worked and then idled for `IDLE_S`.

    Inconsistencies are logged and counted; the engine continues. An audit of 65,536 blocks takes some 150 ms, so it is
    done in pieces of a millisecond or two, between which the loop reads messages. Work cancels an audit in progress.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._worked_s: float | None = None  # time of the last work; None = audited since
        self._pieces: Iterator[None] | None = None

    @property
    def under_way(self) -> bool:
        """True if there is another piece, to be done at once."""
        return self._pieces is not None

    def busy(self) -> None:
        """Note a step. Call this after each."""
        self._worked_s = self._clock.now()
        self._pieces = None

    def idle(self) -> None:
        """Do a piece, if one is due. Call this when there is nothing else to do."""
        if self._pieces is None:
            if self._worked_s is None or self._clock.now() - self._worked_s < IDLE_S:
                return
            self._worked_s = None
            self._pieces = self._scheduler.audit()
        try:
            next(self._pieces)
        except StopIteration:
            self._pieces = None
        except AssertionError as error:
            self._pieces = None
            self._scheduler.integrity_errors += 1
            log.error("inconsistent scheduler state, which is a bug in roseinfer: %s", error)
