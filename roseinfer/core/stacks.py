"""Stack dumps of engine processes that have stopped responding.

A signal makes the process write the stacks of all its threads to a file. The handler is written in C and needs no
interpreter. So it works while a thread is stuck in native code or never releases the interpreter's lock.
"""

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

from roseinfer.core.process_stat import stat_fields

SIGNAL = getattr(signal, "SIGUSR1", None)  # not every system has it
MAX_CHARS = 20_000


def stacks_path(private: Path, index: int) -> Path:
    """Return the file for the stacks of engine `index`, in the folder that it shares with its owner."""
    return private / f"stacks{index}"


def rank_stacks_path(private: Path, index: int, rank: int, pid: int) -> Path:
    """Return the file for the stacks of process `pid`, which is rank `rank` of the engine."""
    return private / f"stacks{index}.{rank}.{pid}"


def enable_stack_dumps(path: Path) -> None:
    """Make this process write its stacks to `path` whenever it gets the signal."""
    if SIGNAL is None:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


def request_stack_dumps(private: Path, index: int, pid: int) -> None:
    """Ask an engine's process `pid` and its other ranks to write their stacks.

    The process must have called `enable_stack_dumps`: the signal ends any other process.
    """
    _signal(pid)
    _ask_ranks(private, index, pid)


def _ask_ranks(private: Path, index: int, pid: int) -> None:
    for path in _rank_files(private, index):
        rank = int(path.name.split(".")[2])
        if _parent_of(rank) == pid:  # otherwise it has ended, and its pid may have been reused
            _signal(rank)


def read_stacks(private: Path, index: int) -> str:
    """Return the stacks written so far."""
    stacks = [_read(stacks_path(private, index))]
    for path in _rank_files(private, index):
        if text := _read(path):
            stacks.append(f"rank {path.name.split('.')[1]}:\n{text}")
    return "\n".join(filter(None, stacks))


def forget_ranks(private: Path, index: int) -> None:
    """Remove the stack files of ranks of an earlier engine process."""
    for path in _rank_files(private, index):
        path.unlink(missing_ok=True)


def _rank_files(private: Path, index: int) -> list[Path]:
    return sorted(private.glob(f"stacks{index}.*.*"))


def _signal(pid: int) -> None:
    if SIGNAL is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)


def _parent_of(pid: int) -> int | None:
    """Return the parent's pid, or None where the system does not provide it."""
    try:
        return int(stat_fields(pid)[1])
    except (OSError, ValueError, IndexError):
        return None


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CHARS).rstrip()
    except OSError:
        return ""
