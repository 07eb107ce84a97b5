"""Heartbeat of an event loop. The age of heartbeats is tested in `tests/processes`."""

import asyncio
from pathlib import Path

from roseinfer.processes.heartbeat import CHECK_INTERVAL_S
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.server.workers.counters import WORKER_ROWS, Count
from roseinfer.server.workers.heartbeat import LoopHeartbeat


def test_an_event_loop_beats_as_long_as_it_runs(tmp_path: Path) -> None:
    counters = SharedRows.create(tmp_path / "counters", WORKER_ROWS, 2)

    async def main() -> None:
        heartbeat = LoopHeartbeat(counters, 1)
        async with asyncio.timeout(30):
            while counters.get(1, Count.BEATS) < 3:
                await asyncio.sleep(0.01)
        heartbeat.stop()
        before = counters.get(1, Count.BEATS)
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        assert counters.get(1, Count.BEATS) == before

    asyncio.run(main())
    assert counters.get(0, Count.BEATS) == 0
