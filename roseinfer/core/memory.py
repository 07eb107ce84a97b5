"""Memory available to this process."""

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes that new allocations can take, within the container's limit if there is one."""
    limits = [_meminfo_available(meminfo), _cgroup_room(cgroup)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo_available(path: Path) -> int | None:
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room(folder: Path) -> int | None:
    """Return the bytes that cgroup v2 leaves to this container, or None without a limit.

    Cached files, such as freshly downloaded weights, count as used there until memory is needed. They are free here, as
    in the machine's `MemAvailable`.
    """
    limit, used = folder / "memory.max", folder / "memory.current"
    if not (limit.is_file() and used.is_file()):
        return None
    text = limit.read_text().strip()
    if text == "max":
        return None
    return min(int(text), max(0, int(text) - int(used.read_text()) + _cached_bytes(folder / "memory.stat")))


def _cached_bytes(path: Path) -> int:
    """Return the bytes of cached files that the kernel may drop. Files in memory (tmpfs) are on other lists."""
    if not path.is_file():
        return 0
    numbers = dict(line.split() for line in path.read_text().splitlines())
    return sum(int(numbers.get(name, 0)) for name in ("active_file", "inactive_file"))
