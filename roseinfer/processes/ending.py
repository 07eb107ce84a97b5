"""Ends of processes, before others can notice them by closed connections."""

import os
import signal

from roseinfer.core.process_stat import stat_fields

# States in /proc/PID/stat, and bits of its flags (PF_EXITING: dismantled by the kernel) and pending signals.
_ENDED = (b"Z", b"X")
_EXITING_BITS, _KILLED_BITS = 0x4, 1 << (signal.SIGKILL - 1)


def is_ending(pid: int) -> bool:
    """Return True if a process has ended, or has been killed and is being dismantled.

    The latter takes seconds with a GPU or much memory, and its connections stay open meanwhile. False if the system
    does not show it, as where /proc is that of other processes.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return False
        fields = stat_fields(pid)
        state, flags, pending = fields[0], int(fields[6]), int(fields[28])
    except (FileNotFoundError, ProcessLookupError):
        return _is_gone(pid)
    except (OSError, ValueError, IndexError):
        return False
    return state in _ENDED or bool(flags & _EXITING_BITS) or bool(pending & _KILLED_BITS)


def _is_gone(pid: int) -> bool:
    """Return True if there is no such process; /proc may hide those of others."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
