"""Log what takes a while when a child process starts."""

import logging
import threading

log = logging.getLogger(__name__)

FIRST_LINE_S = 2.0  # shorter stages are not logged
REPEAT_S = 30.0


class LoggedStages:
    """Listener of `roseinfer.core.progress`. A timer logs long stages, also those that report no progress."""

    def __init__(self) -> None:
        self._what = ""
        self._progress = ""
        self._timer: threading.Timer | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        self._progress = f": {done} of {total}" if total else ""
        if what != self._what:
            self._what = what
            self._set_timer(FIRST_LINE_S if what else None)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = threading.Timer(seconds, self._log, (self._what,))
            self._timer.daemon = True
            self._timer.start()

    def _log(self, what: str) -> None:
        if what != self._what:
            return
        log.info("%s%s", what, self._progress)
        self._set_timer(REPEAT_S)
