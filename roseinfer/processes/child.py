"""The child's side of `processes.launch`: the first lines of its `main`.

::

    class WorkerBoot(msgspec.Struct):
        log: LogSettings  # LogSettings.current() in the parent
        ...

    def main() -> int:
        ignore_terminal_signals()
        boot = read_boot(WorkerBoot)
        boot.log.apply()
        exit_with_parent(EXIT_TIMEOUT_S)
        ...

A child learns of its parent's end in three ways: by its own protocol, when a socket closes, and then it ends in order;
by `exit_with_parent`, for a child that is stuck; by `die_with_parent_thread`, for one that must not outlive its parent
by a moment and has nothing to clean up.

Errors that keep a child from starting travel as `ErrorReport`, so that the parent raises the same typed error.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

import msgspec

from roseinfer.core import errors, logs
from roseinfer.core.errors import RoseinferError

# Terminals and service managers send these to a whole process group; the parent decides what they mean.
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_MESSAGE_CHARS = 500

Boot = TypeVar("Boot")


class LogSettings(msgspec.Struct, frozen=True):
    """Level and format of our log, which a child takes over from its parent."""

    level: str
    as_json: bool

    @classmethod
    def current(cls) -> Self:
        """Return the settings of this process."""
        level = logging.getLogger("roseinfer").getEffectiveLevel()
        return cls(logging.getLevelName(level), logs.logs_json())

    def apply(self, *, engine: int | None = None, rank: int | None = None) -> None:
        """Log to standard error in the same way. Other libraries' loggers keep their level."""
        logs.configure(as_json=self.as_json, engine=engine, rank=rank)
        logging.getLogger("roseinfer").setLevel(self.level)


def ignore_terminal_signals() -> None:
    """Ignore Ctrl+C and what service managers send to all processes of a service; the parent handles them."""
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)  # a parent may block them while it launches


def read_boot(kind: type[Boot]) -> Boot:
    """Return the boot struct from standard input. Exit if the parent has ended before it sent a whole one."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        sys.exit(1)
    return msgspec.json.decode(line, type=kind)


def take_stdout() -> int:
    """Return a descriptor of standard output, for frames to a parent that launched this process with `read_stdout`.

    Other output goes to standard error from now on. Children of this process do not inherit the descriptor.
    """
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def exit_with_parent(timeout_s: float, on_orphaned: Callable[[], object] = lambda: None) -> None:
    """Start a thread that ends this process when the parent has ended, for a child that is stuck in its work.

    It calls `on_orphaned` first and then leaves the child `timeout_s` seconds to end by itself.
    """
    arguments = (sys.stdin.fileno(), timeout_s, on_orphaned)
    threading.Thread(target=_exit_at_end_of, args=arguments, name="parent-watch", daemon=True).start()


def _exit_at_end_of(stdin: int, timeout_s: float, on_orphaned: Callable[[], object]) -> None:
    # The descriptor and not the file object, whose lock the interpreter could not take from this thread at exit.
    while os.read(stdin, 1):
        pass
    on_orphaned()
    time.sleep(timeout_s)
    os._exit(1)


def die_with_parent_thread() -> None:
    """Have Linux kill this process when the thread that launched it ends, also while it is stopped or in a kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class ErrorReport(msgspec.Struct, frozen=True):
    """Error of a child for its parent. `kind`: name of a class in `core.errors`, or "" for an unexpected error."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        try:
            message = str(error)
        except Exception:
            message = "its message cannot be shown"
        message = message.encode(errors="replace").decode()  # JSON has no lone surrogates
        if isinstance(error, RoseinferError):
            return cls(type(error).__name__, message)
        return cls("", f"{type(error).__name__}: {message}"[:MAX_MESSAGE_CHARS])

    def as_error(self) -> RoseinferError | None:
        """Return the typed error, or None for an unexpected error."""
        kind = getattr(errors, self.kind, None) if self.kind else None
        if isinstance(kind, type) and issubclass(kind, RoseinferError):
            with contextlib.suppress(TypeError):  # an error that takes more than a message
                return kind(self.message)
        return None
