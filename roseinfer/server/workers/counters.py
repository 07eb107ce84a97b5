"""Numbers that every worker writes of itself and everybody reads: limits hold for the server as a whole."""

import mmap
import os
from enum import IntEnum

from roseinfer.engine.live import InflightLimit
from roseinfer.server.request.lifecycle import Occupancy

_COUNT_BYTES = 8


class Count(IntEnum):
    REQUESTS = 0
    PROMPTS = 1
    INFLIGHT = 2
    CLOSED = 3  # connections that have ended, ever
    BEATS = 4  # of the event loop, ever


class SharedCounters:
    """A row of 64-bit counts for each worker, in memory that its processes share.

    Nobody waits for anybody: each worker writes its own row only, and an aligned count is read and written whole. Two
    workers that look at the same moment may both take the last place below a limit, so it can be passed by as many
    as there are workers, less one.
    """

    def __init__(self, descriptor: int, workers: int) -> None:
        self._memory = mmap.mmap(descriptor, workers * len(Count) * _COUNT_BYTES)
        self._counts = memoryview(self._memory).cast("q")
        self._columns = [self._counts[count :: len(Count)] for count in Count]

    def get(self, worker: int, count: Count) -> int:
        return self._counts[worker * len(Count) + count]

    def add(self, worker: int, count: Count, amount: int) -> None:
        self._counts[worker * len(Count) + count] += amount

    def set(self, worker: int, count: Count, value: int) -> None:
        self._counts[worker * len(Count) + count] = value

    def clear(self, worker: int) -> None:
        """Forget a worker that is gone."""
        for count in Count:
            self.set(worker, count, 0)

    def total(self, count: Count) -> int:
        return sum(self._columns[count])


def counters_file(path: str, workers: int) -> int:
    """The descriptor of new counters, all zero. The file needs no name once everybody has the descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(descriptor, workers * len(Count) * _COUNT_BYTES)
    os.unlink(path)
    return descriptor


class SharedOccupancy(Occupancy):
    """What requests take up in all workers."""

    def __init__(self, counters: SharedCounters, worker: int) -> None:
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
    """The limit on requests in the engine, over all workers."""

    def __init__(self, limit: int | None, counters: SharedCounters, worker: int) -> None:
        super().__init__(limit)
        self._counters = counters
        self._worker = worker

    def update(self, own: int) -> None:
        super().update(own)
        self._counters.set(self._worker, Count.INFLIGHT, own)

    def total(self) -> int:
        return self._counters.total(Count.INFLIGHT)
