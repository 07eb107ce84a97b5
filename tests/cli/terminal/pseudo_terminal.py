"""A command in a pseudo-terminal that a test controls."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from types import TracebackType
from typing import Self

from tests.helpers.process_table import process_table
from tests.server.real_server import until

PATIENCE_S = 40.0


class PseudoTerminal:
    """`roseinfer ARGS` in a pseudo-terminal. A context manager: the command is stopped on exit.

    `ignores_interrupts`: start it with SIGINT ignored, as shells start a script's background jobs.
    """

    def __init__(self, *args: str, columns: int = 100, rows: int = 30, ignores_interrupts: bool = False) -> None:
        self._args = args
        self._interrupts = signal.SIG_IGN if ignores_interrupts else signal.SIG_DFL
        self._size = (columns, rows)
        self.shown = ""

    def __enter__(self) -> Self:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            # Without a size: readline, if loaded here, leaves one in the environment.
            kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            signal.signal(signal.SIGINT, self._interrupts)  # whatever the tests' own process inherited
            command = [sys.executable, "-m", "roseinfer.cli", *self._args]
            os.execve(sys.executable, command, {**kept, "TERM": "xterm-256color"})
        self.resize(*self._size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, text: str) -> str:
        """Wait until `text` appears after the last call; return the output up to there."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < deadline and self._read(), f"{text!r} never came: {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def until_it_waits(self) -> None:
        """Wait until typed input is read and more is awaited: readline loses a signal that comes just before."""
        until(lambda: process_table()[self.pid].state.startswith("S"))

    def exit_code(self) -> int:
        """Wait for the exit of the command; its output is in `shown`."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < deadline, f"it never ended: {self.shown!r}"
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """Read once; return False at the end of the output."""
        ready, _, _ = select.select([self._fd], [], [], PATIENCE_S)
        assert ready, f"nothing came any more: {self.shown!r}"
        with contextlib.suppress(OSError):  # Linux reports the closed other end this way
            part = os.read(self._fd, 65536)
            self.shown += part.decode(errors="replace")
            return bool(part)
        return False
