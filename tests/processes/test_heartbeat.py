"""A process that does nothing is distinguished from one that has much to do."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from roseinfer.processes.heartbeat import (
    CHECK_INTERVAL_S,
    MAX_BUSY_FACTOR,
    STOPPED_LATE_S,
    HeartbeatMonitor,
    ProcessStats,
    process_stats,
)

LATE_S, TIMEOUT_S = 5.0, 20.0
IDLE, STOPPED = ProcessStats(1.0, False), ProcessStats(1.0, True)


def until(
    condition: str, *, allowance_s: float = 0.0, seen: Callable[[float], ProcessStats | None], computes: bool = False
) -> float:
    """Return after how many seconds without a beat `condition` holds; -1: not within an hour."""
    monitor = HeartbeatMonitor(LATE_S, TIMEOUT_S, computes=computes)
    monitor.check(1, stats=seen(0.0))
    for check in range(1, round(3600 / CHECK_INTERVAL_S)):
        if getattr(monitor.check(1, allowance_s=allowance_s, stats=seen(check * CHECK_INTERVAL_S)), condition):
            return check * CHECK_INTERVAL_S
    return -1.0


def idle(_: float) -> ProcessStats:
    return IDLE


def busy(seconds: float) -> ProcessStats:
    return ProcessStats(1.0 + 0.5 * seconds, False)


def test_each_beat_begins_anew() -> None:
    monitor = HeartbeatMonitor(LATE_S, TIMEOUT_S, computes=False)
    for beat in range(100):
        ages = [monitor.check(beat, stats=IDLE) for _ in range(round(LATE_S / CHECK_INTERVAL_S))]
        assert ages[0].seconds == 0 and not any(age.late for age in ages)


def test_a_heartbeat_is_first_late_and_then_timed_out() -> None:
    assert until("late", seen=idle) == LATE_S and until("timed_out", seen=idle) == TIMEOUT_S


def test_the_allowance_is_added_to_the_limits() -> None:
    assert until("late", allowance_s=30.0, seen=idle) == LATE_S + 30
    assert until("timed_out", allowance_s=30.0, seen=idle) == TIMEOUT_S + 30
    assert until("timed_out", allowance_s=1e9, seen=idle) == (1 + MAX_BUSY_FACTOR) * TIMEOUT_S, "but not for ever"


def test_between_two_heartbeats_no_process_is_late() -> None:
    monitor = HeartbeatMonitor(0.1, 0.2, computes=False)
    ages = [monitor.check(1, stats=IDLE) for _ in range(round(1 / CHECK_INTERVAL_S) + 1)]
    assert [age.late for age in ages] == [age.timed_out for age in ages]
    assert [age.late for age in ages].index(True) == round(1 / CHECK_INTERVAL_S)


def test_a_stopped_process_is_late_at_once_whatever_its_allowance() -> None:
    assert until("late", allowance_s=30.0, seen=lambda _: STOPPED) == STOPPED_LATE_S
    assert until("timed_out", allowance_s=30.0, seen=lambda _: STOPPED) == TIMEOUT_S


def test_a_process_that_computes_on_the_cpu_gets_more_time() -> None:
    assert until("late", seen=busy, computes=True) == MAX_BUSY_FACTOR * LATE_S
    assert until("timed_out", seen=busy, computes=True) == MAX_BUSY_FACTOR * TIMEOUT_S
    assert until("late", seen=busy) == LATE_S, "before a GPU that has failed, the processor is busy too"
    assert until("late", seen=idle, computes=True) == LATE_S
    assert until("late", seen=lambda s: ProcessStats(1.0 + 0.1 * s, False), computes=True) == LATE_S


def test_statistics_that_the_system_lacks_count_in_favour_of_the_process() -> None:
    assert until("late", seen=lambda _: None, computes=True) == MAX_BUSY_FACTOR * LATE_S
    assert until("late", seen=lambda _: None) == LATE_S


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_process_is_seen_to_work_and_to_be_stopped() -> None:
    before = process_stats(os.getpid())
    while (now := process_stats(os.getpid())) == before:
        pass
    assert before is not None and now is not None and now.cpu_s > before.cpu_s and not now.stopped
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        seen = process_stats(sleeper.pid)
        assert seen is not None and seen.stopped
    finally:
        sleeper.kill()
        sleeper.wait()
    assert process_stats(sleeper.pid) is None
