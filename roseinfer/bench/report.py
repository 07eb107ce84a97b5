"""Machine and versions for a benchmark's output, percentiles, tables and JSON."""

import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("roseinfer", "torch", "transformers", "triton")


def percentile(values: Sequence[float], p: float) -> float:
    """Interpolate linearly between closest ranks; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * p / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def percentiles(values: Sequence[float], shares: Iterable[int], scale: float = 1.0) -> dict[str, float | None]:
    """Return percentiles times `scale`, as `p50` and so on; None for no values."""
    return {f"p{p}": scale * percentile(values, p) if values else None for p in shares}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def host() -> dict[str, Any]:
    """Return the processor, the cores that this process may use, and the memory in GiB. Do not import torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"cpu": _cpu_name(), "cores": cores}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return found


def hardware() -> dict[str, Any]:
    """Return the host, the instruction set that torch uses, and the GPU if torch sees one."""
    import torch

    found = {**host(), "isa": torch.backends.cpu.get_cpu_capability()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        names = {key.strip(): value.strip() for key, value in fields.items()}
        model = f"family {names.get('cpu family')} model {names.get('model')}"
        return f"{names.get('model name', platform.machine())} ({model})"
    return platform.processor() or platform.machine()


def header(title: str, args: Mapping[str, Any], machine: Mapping[str, Any] | None = None) -> str:
    """Return the heading of a benchmark's output. `machine`: hardware to print instead of this machine's."""
    found = hardware() if machine is None else machine
    hardware_line = ", ".join(f"{key} {value}" for key, value in found.items())
    packages = ", ".join(f"{key} {value}" for key, value in versions().items())
    options = " ".join(f"{key}={value}" for key, value in args.items() if value is not None)
    return f"{title}\n  hardware: {hardware_line}\n  versions: {packages}\n  options:  {options}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a table; columns are the keys of the first row."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(names)]
    lines = ["  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write_json(
    path: str, result: Mapping[str, Any], args: Mapping[str, Any], machine: Mapping[str, Any] | None = None
) -> None:
    """Write `result` with versions, hardware (`machine`, if given) and `args`."""
    found = hardware() if machine is None else dict(machine)
    whole = {**result, "versions": versions(), "hardware": found, "args": dict(args)}
    Path(path).write_text(json.dumps(whole, indent=2, default=str) + "\n")
