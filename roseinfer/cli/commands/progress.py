"""Progress of long operations on stderr, for all commands.

Work reports through `roseinfer.core.progress`; every command runs with a `Progress` that listens.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

from roseinfer.core.progress import listening

FIRST_LINE_S = 2.0  # shorter operations need no line
LOG_INTERVAL_S = 30.0  # interval where lines stay
REDRAW_INTERVAL_S = 0.2  # interval where the line is overwritten
MAX_STAGE_GAP_S = 0.5  # stages that follow each other faster count as one wait


class Progress:
    """One line that is overwritten on a terminal; elsewhere a new line now and then. Short operations print nothing.

    Use it as a context manager. `report` sets the current operation and its progress. A thread rewrites the line while
    an operation lasts. `what`: the operation at the start.
    """

    def __init__(self, what: str = "", out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._what, self._done, self._total = "", 0, 0
        self._stage_s = self._next_s = 0.0
        self._idle_s = float("-inf")  # end time of the last stage
        self._shown = False
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._ticker: threading.Thread | None = None
        if what:
            self.report(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove the line and stop printing."""
        with self._writing:
            self._over.set()
            self._wipe()

    def report(self, what: str, done: int = 0, total: int = 0) -> None:
        """Set the current operation and progress; see `roseinfer.core.progress`."""
        with self._writing:
            if what != self._what:
                self._start_stage(what, monotonic())
            self._done, self._total = done, total
        self.tick()

    def tick(self) -> None:
        """Write the line if it is due."""
        with self._writing:
            now_s = monotonic()
            if not self._what or now_s < self._next_s or self._over.is_set():
                return
            self._next_s = now_s + (REDRAW_INTERVAL_S if self._terminal else LOG_INTERVAL_S)
            line = self._line(now_s)
            self._write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
            self._shown = True

    def _start_stage(self, what: str, now_s: float) -> None:
        if not what:
            self._idle_s = now_s
            self._wipe()
        elif not self._what and now_s - self._idle_s > MAX_STAGE_GAP_S:
            self._next_s = now_s + FIRST_LINE_S
        self._what, self._stage_s = what, now_s
        if what and self._ticker is None:
            self._ticker = threading.Thread(target=self._run, name="progress", daemon=True)
            self._ticker.start()

    def _line(self, now_s: float) -> str:
        passed_s = now_s - self._stage_s
        if not self._total:
            return f"{self._what}: {passed_s:.0f} s"
        line = f"{self._what}: {self._done} of {self._total}"
        if self._done:
            line += f", some {passed_s / self._done * (self._total - self._done):.0f} s left"
        return line

    def _wipe(self) -> None:
        if self._shown and self._terminal:
            self._write("\r\x1b[K")
        self._shown = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the work
            self._out.write(text)
            self._out.flush()

    def _run(self) -> None:
        while not self._over.wait(REDRAW_INTERVAL_S):
            self.tick()


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show the progress that the work inside the context reports, from any thread of this process."""
    with Progress() as progress, listening(progress.report):
        yield
