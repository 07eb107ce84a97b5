"""Counters of all workers in shared memory, so that limits hold for the server as a whole."""

from enum import IntEnum
from typing import Any

from roseinfer.processes.shared_rows import RowLayout


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
