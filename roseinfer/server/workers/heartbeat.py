"""Heartbeat of a worker: its event loop counts beats in shared memory, which the manager checks."""

import asyncio
from typing import Any

from roseinfer.processes.heartbeat import CHECK_INTERVAL_S
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.server.workers.counters import Count


class LoopHeartbeat:
    """Beats as long as the event loop runs."""

    def __init__(self, counters: SharedRows[Any], index: int) -> None:
        self._counters = counters
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._beat()

    def _beat(self) -> None:
        self._counters.add(self._index, Count.BEATS, 1)
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._beat)

    def stop(self) -> None:
        self._timer.cancel()
