"""How far something is that takes a while, on stderr: the one mechanism that all commands use."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

SOON_S = 2.0  # what takes no longer needs no line
BETWEEN_S = 30.0  # where lines stay
FRAME_S = 0.2  # where they are written over


class Progress:
    """One line that is written over on a terminal; elsewhere one now and then. None for what is done at once.

    Use as a context manager. `stage` and `show` say what is done and how far it is; with `ticks` a thread writes the
    line also while nobody says anything, as who loads or waits does.
    """

    def __init__(self, what: str, out: TextIO | None = None, *, ticks: bool = False) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._began_s = self._stage_s = monotonic()
        self._next_s = self._began_s + SOON_S
        self._what, self._done, self._total = what, 0, 0
        self._shown = False
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._ticker = threading.Thread(target=self._run, name="progress", daemon=True) if ticks else None

    def __enter__(self) -> Self:
        if self._ticker is not None:
            self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """The line goes away, and none comes any more."""
        with self._writing:
            self._over.set()
            self._wipe()

    def stage(self, what: str) -> None:
        """Something else is done now; how much of it there is, nobody knows yet."""
        self.report(what)

    def show(self, done: int, total: int) -> None:
        self.report(self._what, done, total)

    def report(self, what: str, done: int = 0, total: int = 0) -> None:
        """Both at once, as `roseinfer.core.progress` has it."""
        if what != self._what:
            self._what, self._stage_s = what, monotonic()
        self._done, self._total = done, total
        self.tick()

    def tick(self) -> None:
        """Writes the line if it is time to."""
        with self._writing:
            now_s = monotonic()
            if now_s < self._next_s or self._over.is_set():
                return
            self._next_s = now_s + (FRAME_S if self._terminal else BETWEEN_S)
            line = self._line(now_s)
            self._out.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
            self._out.flush()
            self._shown = True

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
            self._out.write("\r\x1b[K")
            self._out.flush()
        self._shown = False

    def _run(self) -> None:
        while not self._over.wait(FRAME_S):
            self.tick()


@contextmanager
def told(what: str) -> Iterator[Progress]:
    """Shows what the work inside reports, wherever in this process it does so, and `what` until it does."""
    from roseinfer.core.progress import listening

    with Progress(what, ticks=True) as progress, listening(progress.report):
        yield progress
