"""Limits over the shared counters of all workers."""

from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import TooManyInflightError
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.server.request.lifecycle import Lifecycle, Ticket
from roseinfer.server.workers.counters import WORKER_ROWS
from roseinfer.server.workers.shared_limits import SharedInflight, SharedOccupancy

WORKERS = 3


@pytest.fixture
def counters(tmp_path: Path) -> SharedRows[Any]:
    return SharedRows.create(tmp_path / "counters", WORKER_ROWS, WORKERS)


def test_the_queue_is_full_for_all_workers_at_once(counters: SharedRows[Any]) -> None:
    lifecycles = [
        Lifecycle(3, ManualClock(), SharedOccupancy(counters, worker), 1 / WORKERS) for worker in range(WORKERS)
    ]
    with Ticket(lifecycles[0]) as ticket, Ticket(lifecycles[1]):
        assert all(lifecycle.refusal() is None for lifecycle in lifecycles)
        ticket.grow(2)
        codes = [refused.code for lifecycle in lifecycles if (refused := lifecycle.refusal()) is not None]
        assert codes == ["queue_full"] * WORKERS
        assert [lifecycle.room.all_requests() for lifecycle in lifecycles] == [2] * WORKERS
        assert [lifecycle.requests for lifecycle in lifecycles] == [1, 1, 0]
    assert all(lifecycle.refusal() is None for lifecycle in lifecycles)


def test_the_limit_on_requests_in_the_engine_counts_all_workers(counters: SharedRows[Any]) -> None:
    here, there = (SharedInflight(3, counters, worker) for worker in (0, 2))
    here.update(2)
    there.check()
    there.update(1)
    for inflight in (here, there):
        with pytest.raises(TooManyInflightError, match=r"in the engine \(--max-inflight-requests 3"):
            inflight.check()
    here.update(1)
    there.check()
    SharedInflight(None, counters, 1).check()
