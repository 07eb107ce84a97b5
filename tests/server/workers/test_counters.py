"""Counts that processes share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import TooManyInflightError
from roseinfer.server.request.lifecycle import Lifecycle
from roseinfer.server.workers.counters import Count, SharedCounters, SharedInflight, SharedOccupancy, counters_file

WORKERS = 3
ANOTHER_PROCESS = """
import sys
from roseinfer.server.workers.counters import SharedCounters, Count
counters = SharedCounters(int(sys.argv[1]), 3)
assert counters.total(Count.PROMPTS) == 5
counters.add(2, Count.PROMPTS, 2**40)
"""


@pytest.fixture
def counters(tmp_path: Path) -> SharedCounters:
    return SharedCounters(counters_file(str(tmp_path / "counters"), WORKERS), WORKERS)


def test_another_process_sees_it_and_is_seen(tmp_path: Path) -> None:
    descriptor = counters_file(str(tmp_path / "counters"), WORKERS)
    assert os.listdir(tmp_path) == [], "it needs no name"
    counters = SharedCounters(descriptor, WORKERS)
    counters.add(1, Count.PROMPTS, 5)
    command = [sys.executable, "-c", ANOTHER_PROCESS, str(descriptor)]
    subprocess.run(command, pass_fds=(descriptor,), check=True, timeout=60)
    assert counters.total(Count.PROMPTS) == 5 + 2**40
    assert counters.total(Count.REQUESTS) == 0
    counters.clear(2)
    assert counters.total(Count.PROMPTS) == counters.get(1, Count.PROMPTS) == 5
    os.close(descriptor)


def test_the_queue_is_full_for_everybody_at_once(counters: SharedCounters) -> None:
    lifecycles = [
        Lifecycle(3, ManualClock(), SharedOccupancy(counters, worker), 1 / WORKERS) for worker in range(WORKERS)
    ]
    for lifecycle in lifecycles:
        lifecycle.ready()
    with lifecycles[0].ticket() as ticket, lifecycles[1].ticket():
        assert all(lifecycle.refusal() is None for lifecycle in lifecycles)
        ticket.grow(2)
        codes = [refused.code for lifecycle in lifecycles if (refused := lifecycle.refusal()) is not None]
        assert codes == ["queue_full"] * WORKERS
        assert [lifecycle.room.all_requests() for lifecycle in lifecycles] == [2] * WORKERS
        assert [lifecycle.requests for lifecycle in lifecycles] == [1, 1, 0]
    assert all(lifecycle.refusal() is None for lifecycle in lifecycles)


def test_the_limit_on_requests_in_the_engine_is_one(counters: SharedCounters) -> None:
    here, there = (SharedInflight(3, counters, worker) for worker in (0, 2))
    here.update(2)
    there.check()
    there.update(1)
    for inflight in (here, there):
        with pytest.raises(TooManyInflightError, match="3 requests"):
            inflight.check()
    here.update(1)
    there.check()
    SharedInflight(None, counters, 1).check()
