"""How far something is that takes a while, on stderr: the one mechanism that all commands use.

Who works says so by `roseinfer.core.progress`; every command is run with a `Progress` that listens.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

from roseinfer.core.progress import listening

SOON_S = 2.0  # what takes no longer needs no line
BETWEEN_S = 30.0  # where lines stay
FRAME_S = 0.2  # where they are written over
PAUSE_S = 0.5  # stages that follow each other sooner are one wait


class Progress:
    """One line that is written over on a terminal; elsewhere one now and then. None for what is done at once.

    Use as a context manager. `report` says what is done and how far it is. Once something is, a thread writes the line
    also while nobody says anything. `what`: is done from the start.
    """

    def __init__(self, what: str = "", out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._what, self._done, self._total = "", 0, 0
        self._stage_s = self._next_s = 0.0
        self._idle_s = float("-inf")  # when the last stage ended
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
        """The line goes away, and none comes any more."""
        with self._writing:
            self._over.set()
            self._wipe()

    def report(self, what: str, done: int = 0, total: int = 0) -> None:
        """As `roseinfer.core.progress` has it."""
        with self._writing:
            if what != self._what:
                self._turn_to(what, monotonic())
            self._done, self._total = done, total
        self.tick()

    def tick(self) -> None:
        """Writes the line if it is time to."""
        with self._writing:
            now_s = monotonic()
            if not self._what or now_s < self._next_s or self._over.is_set():
                return
            self._next_s = now_s + (FRAME_S if self._terminal else BETWEEN_S)
            line = self._line(now_s)
            self._out.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
            self._out.flush()
            self._shown = True

    def _turn_to(self, what: str, now_s: float) -> None:
        if not what:
            self._idle_s = now_s
            self._wipe()
        elif not self._what and now_s - self._idle_s > PAUSE_S:
            self._next_s = now_s + SOON_S
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
            self._out.write("\r\x1b[K")
            self._out.flush()
        self._shown = False

    def _run(self) -> None:
        while not self._over.wait(FRAME_S):
            self.tick()


@contextmanager
def shown() -> Iterator[None]:
    """What the work inside reports, wherever in this process it does so, is shown."""
    with Progress() as progress, listening(progress.report):
        yield
