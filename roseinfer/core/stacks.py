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


def rank_stacks_path(private: Path, index: int, rank: int, pid: int) -> Path:
    """Of the process `pid`, another rank of that engine."""
    return private / f"stacks{index}.{rank}.{pid}"


def enable_stack_dumps(path: Path) -> None:
    """From now on this process writes its stacks to `path` when it gets the signal."""
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
    for path in _of_ranks(private, index):
        rank = int(path.name.split(".")[2])
        if _parent_of(rank) == pid:  # else it has ended, and the number may be another's
            _signal(rank)


def read_stacks(private: Path, index: int) -> str:
    """What was written, as far as it is there."""
    told = [_read(stacks_path(private, index))]
    for path in _of_ranks(private, index):
        if where := _read(path):
            told.append(f"rank {path.name.split('.')[1]}:\n{where}")
    return "\n".join(filter(None, told))


def forget_ranks(private: Path, index: int) -> None:
    """Remove what the ranks of an earlier process of the engine have written."""
    for path in _of_ranks(private, index):
        path.unlink(missing_ok=True)


def _of_ranks(private: Path, index: int) -> list[Path]:
    return sorted(private.glob(f"stacks{index}.*.*"))


def _signal(pid: int) -> None:
    if SIGNAL is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)


def _parent_of(pid: int) -> int | None:
    """None where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CHARS).rstrip()
    except OSError:
        return ""
