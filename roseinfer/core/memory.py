"""How much memory the machine has for us."""

import os
from pathlib import Path


def available_memory_bytes() -> int:
    """Memory that new allocations can take, within the container's limit if there is one."""
    limits = [_meminfo_available(), _cgroup_room(Path("/sys/fs/cgroup"))]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo_available() -> int | None:
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room(folder: Path) -> int | None:
    """What cgroup v2 leaves to this container; None without a limit."""
    limit, used = folder / "memory.max", folder / "memory.current"
    if not (limit.is_file() and used.is_file()):
        return None
    text = limit.read_text().strip()
    return None if text == "max" else max(0, int(text) - int(used.read_text()))
