"""Ends of processes, before others can notice them by closed connections."""

import signal
from pathlib import Path

# States in /proc/PID/stat, and bits of its flags (PF_EXITING: dismantled by the kernel) and pending signals.
_ENDED = (b"Z", b"X")
_EXITING_BITS, _KILLED_BITS = 0x4, 1 << (signal.SIGKILL - 1)


def is_ending(pid: int) -> bool:
    """Return True if a process has ended, or has been killed and is being dismantled.

    The latter takes seconds with a GPU or much memory, and its connections stay open meanwhile. False if the system
    does not tell.
    """
    try:
        # The name, in parentheses, may hold anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()
    except OSError:
        return False
    flags, pending = int(fields[5]), int(fields[27])
    return state in _ENDED or bool(flags & _EXITING_BITS) or bool(pending & _KILLED_BITS)
