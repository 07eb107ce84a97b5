"""Counters of all workers in shared memory, so that limits hold for the server as a whole."""

from enum import IntEnum
from typing import Any

from roseinfer.engine.live import InflightLimit
from roseinfer.processes.shared_rows import RowLayout, SharedRows
from roseinfer.server.request.lifecycle import Occupancy


class Count(IntEnum):
    """Words of a worker's row. Only that worker writes them.

    Two workers that check a limit at the same moment may both take the last place below it. So a limit may be exceeded
    by as many as there are workers, less one.
    """

    REQUESTS = 0
    PROMPTS = 1
    INFLIGHT = 2
    CLOSED = 3  # connections that have ended, ever
    BEATS = 4  # of the event loop, ever


WORKER_ROWS: RowLayout[Any] = RowLayout(words=len(Count))


class SharedOccupancy(Occupancy):
    """Requests and prompts in all workers."""

    def __init__(self, counters: SharedRows[Any], worker: int) -> None:
        super().__init__()
        self._counters = counters
        self._worker = worker

    def take(self, requests: int, prompts: int) -> None:
        super().take(requests, prompts)
        self._counters.set(self._worker, Count.REQUESTS, self.requests)
        self._counters.set(self._worker, Count.PROMPTS, self.prompts)

    def all_requests(self) -> int:
        return self._counters.total(Count.REQUESTS)

    def all_prompts(self) -> int:
        return self._counters.total(Count.PROMPTS)


class SharedInflight(InflightLimit):
    """Limit on requests in the engine, over all workers."""

    def __init__(self, limit: int | None, counters: SharedRows[Any], worker: int) -> None:
        super().__init__(limit)
        self._counters = counters
        self._worker = worker

    def update(self, own: int) -> None:
        super().update(own)
        self._counters.set(self._worker, Count.INFLIGHT, own)

    def total(self) -> int:
        return self._counters.total(Count.INFLIGHT)
