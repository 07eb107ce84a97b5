"""What an engine process says of its start to whoever reads its log: only where it takes a while."""

import logging
import threading

log = logging.getLogger(__name__)

SOON_S = 2.0  # of a stage that is over sooner nothing is said
BETWEEN_S = 30.0  # of one that goes on


class LoggedStages:
    """A listener of `roseinfer.core.progress`; a timer of its own speaks for stages that report nothing."""

    def __init__(self) -> None:
        self._what = ""
        self._how_far = ""
        self._timer: threading.Timer | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        self._how_far = f": {done} of {total}" if total else ""
        if what != self._what:
            self._what = what
            self._wait(SOON_S if what else None)

    def _wait(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = threading.Timer(seconds, self._say, (self._what,))
            self._timer.daemon = True
            self._timer.start()

    def _say(self, what: str) -> None:
        if what != self._what:
            return
        log.info("%s%s", what, self._how_far)
        self._wait(BETWEEN_S)
