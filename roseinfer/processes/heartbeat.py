"""Heartbeats: when a child process that does not respond counts as late, and when it has timed out.

A child counts its beats, in a shared row (`shared_rows`) or by the messages that it sends. Its parent checks them::

    monitor = HeartbeatMonitor(late_s=5.0, timeout_s=60.0)
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        age = monitor.check(rows.get(index, Count.BEATS), stats=process_stats(child.pid))
        if age.timed_out:
            child.kill()

Age is counted in checks and not on a clock: whatever stops the parent, too, as a debugger or a suspended machine does,
is no fault of the child.
"""

import os
from dataclasses import dataclass
from typing import NamedTuple

from roseinfer.core.process_stat import stat_fields

CHECK_INTERVAL_S = 0.25
# A stopped process gives no sign before it is continued, so it is late soon.
STOPPED_LATE_S = 1.0
# Heartbeats may be half a second apart: a shorter age means nothing.
MIN_LATE_S = 1.0
# Share of a core: a process that uses less is waiting, perhaps for something that never comes.
MIN_BUSY_SHARE = 0.2
# Times the usual limits for a child that is seen to compute, and for the allowance of any child.
MAX_BUSY_FACTOR = 10


class ProcessStats(NamedTuple):
    """`cpu_s`: seconds of processor time that a process has used. `stopped`: by SIGSTOP or a debugger."""

    cpu_s: float
    stopped: bool


def process_stats(pid: int) -> ProcessStats | None:
    """Return the statistics of a process; None if the system provides none, or there is no such process."""
    try:
        fields = stat_fields(pid)  # with utime and stime as the 12th and 13th
        return ProcessStats((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] in (b"T", b"t"))
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class HeartbeatAge:
    """Seconds since the last beat. `late`: the child gets no new work; `timed_out`: it is to be killed."""

    seconds: float = 0.0
    late: bool = False
    timed_out: bool = False


class HeartbeatMonitor:
    """Age of the heartbeat of one process.

    `late_s`, `timeout_s`: limits of the age. `computes`: the child's work takes processor time and may take long; while
    it is seen to use the processor its limits are ten times as long.
    """

    def __init__(self, late_s: float, timeout_s: float, *, computes: bool = False) -> None:
        self._late_s = max(late_s, MIN_LATE_S)
        self._timeout_s = max(timeout_s, self._late_s)
        self._computes = computes
        self._beats = -1
        self._checks = 0
        self._cpu_s = 0.0

    def check(self, beats: int, *, allowance_s: float = 0.0, stats: ProcessStats | None = None) -> HeartbeatAge:
        """Return the age. Call this every `CHECK_INTERVAL_S` seconds.

        `beats`: beats so far. `allowance_s`: expected duration of the child's present work, added to the limits.
        """
        if beats != self._beats:
            self._beats, self._checks = beats, 0
            self._cpu_s = stats.cpu_s if stats is not None else 0.0
            return HeartbeatAge()
        self._checks += 1
        seconds = self._checks * CHECK_INTERVAL_S
        if stats is not None and stats.stopped:
            return HeartbeatAge(seconds, seconds >= STOPPED_LATE_S, seconds >= self._timeout_s)
        factor = MAX_BUSY_FACTOR if self._computes and self._is_busy(stats, seconds) else 1
        # A child's own estimate is no reason to wait for ever.
        allowance_s = min(allowance_s, MAX_BUSY_FACTOR * self._timeout_s)
        return HeartbeatAge(
            seconds,
            seconds >= factor * self._late_s + allowance_s,
            seconds >= factor * self._timeout_s + allowance_s,
        )

    def _is_busy(self, stats: ProcessStats | None, seconds: float) -> bool:
        return stats is None or stats.cpu_s - self._cpu_s >= MIN_BUSY_SHARE * seconds
