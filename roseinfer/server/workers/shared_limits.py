"""Limits that hold for all workers together."""

from typing import Any

from roseinfer.engine.live import InflightLimit
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.server.request.lifecycle import Occupancy
from roseinfer.server.workers.counters import Count


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
