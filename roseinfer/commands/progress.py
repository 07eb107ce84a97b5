"""How far something is that takes a while, on stderr."""

import sys
from time import monotonic
from types import TracebackType
from typing import TextIO

SOON_S = 2.0  # what takes no longer needs no line
BETWEEN_S = 30.0  # where lines stay


class Progress:
    """One line that is written over on a terminal; elsewhere one now and then. None for what is done at once."""

    def __init__(self, what: str, out: TextIO | None = None) -> None:
        self._what = what
        self._out = out or sys.stderr
        self._began_s = monotonic()
        self._next_s = self._began_s + SOON_S
        self._shown = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown and self._out.isatty():
            self._out.write("\r\x1b[K")

    def show(self, done: int, total: int) -> None:
        now_s = monotonic()
        if now_s < self._next_s:
            return
        terminal = self._out.isatty()
        self._next_s = now_s + (0.2 if terminal else BETWEEN_S)
        left_s = (now_s - self._began_s) / done * (total - done)
        line = f"{done} of {total} {self._what}, some {left_s:.0f} s left"
        self._out.write(f"\r\x1b[K{line}" if terminal else f"{line}\n")
        self._out.flush()
        self._shown = True
