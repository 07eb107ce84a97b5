"""When the engine goes through its books: once it has nothing else to do."""

import logging
from collections.abc import Iterator

from roseinfer.core.clock import Clock
from roseinfer.sched.scheduler import Scheduler

log = logging.getLogger(__name__)

# Pauses between the requests of one client are mostly shorter.
IDLE_S = 1.0


class IdleAudit:
    """Audits a scheduler's seats, queues and KV blocks, once after each time that the engine worked and then idled for
    `IDLE_S`. What disagrees is logged and counted; the engine goes on.

    A cache of 65,536 blocks takes some 150 ms, so an audit is done in pieces of a millisecond or two, between which the
    loop looks for messages. Work ends an audit that is under way: it holds for books at rest only.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._worked_s: float | None = None  # when the engine last worked, None once the books have been audited since
        self._pieces: Iterator[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether there is another piece, to be done at once."""
        return self._pieces is not None

    def busy(self) -> None:
        """To be called after each step."""
        self._worked_s = self._clock.now()
        self._pieces = None

    def idle(self) -> None:
        """Do a piece, if one is due. To be called when there is nothing else to do."""
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
            log.error("the engine's books disagree, which is a bug in roseinfer: %s", error)
