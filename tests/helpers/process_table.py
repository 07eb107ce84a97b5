"""Processes of this machine: parents, states and command lines."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Seen(NamedTuple):
    """One line of the process table."""

    parent: int
    state: str


def process_table() -> dict[int, Seen]:
    """Read the process table from /proc, or from ps where there is none."""
    if Path("/proc/self/stat").exists():
        stats = [_read(path / "stat") for path in Path("/proc").iterdir() if path.name.isdecimal()]
        # pid (command) state parent ...; the command may hold anything.
        fields = [(stat.split(" ", 1)[0], *stat.rpartition(")")[2].split()[:2]) for stat in stats if stat]
        return {int(pid): Seen(int(parent), state) for pid, state, parent in fields}
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listed.splitlines()]
    return {int(pid): Seen(int(parent), state) for pid, parent, state in lines}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def children(pid: int) -> list[int]:
    """Return the children except for the one that starts others (`helpers.forked_starts`)."""
    found = [child for child, seen in process_table().items() if seen.parent == pid]
    return [child for child in found if "tests.helpers.forked_starts" not in command_line(child)]


def command_line(pid: int) -> str:
    if Path("/proc/self/cmdline").exists():
        return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").rstrip()
    listed = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True)
    return listed.stdout


def alive(pid: int) -> bool:
    """True if a process runs. False for a zombie."""
    seen = process_table().get(pid)
    return seen is not None and not seen.state.startswith("Z")
