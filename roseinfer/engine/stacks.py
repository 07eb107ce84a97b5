"""Where the threads of an engine process are: told to its owner when nothing else comes from it any more.

A signal has the process write the stacks of all its threads to a file. The handler is one of C and needs no
interpreter, so it works while a thread is stuck in native code or holds the interpreter's lock for ever.
"""

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

SIGNAL = getattr(signal, "SIGUSR1", None)  # which not every system has
MAX_CHARS = 20_000


def stacks_path(private: Path, index: int) -> Path:
    """Of engine `index`, in the folder that it shares with its owner."""
    return private / f"stacks{index}"


def tell_stacks(path: Path) -> None:
    """From now on this process writes its stacks to `path` when it gets the signal."""
    if SIGNAL is None:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


def ask_stacks(pid: int) -> None:
    """Only of a process that has called `tell_stacks`: any other is ended by the signal."""
    if SIGNAL is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)


def read_stacks(path: Path) -> str:
    """What was written, as far as it is there."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CHARS).rstrip()
    except OSError:
        return ""
