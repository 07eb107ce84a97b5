"""State of a process, as Linux shows it in /proc."""

from pathlib import Path


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third on, the state. Raise `OSError` if there are none."""
    # The name, in parentheses, may hold anything.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
