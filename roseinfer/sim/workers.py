"""Processes that simulate."""

import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of `count`. Ctrl+C, which goes to all processes of a terminal, ends them at once with whoever waits for
    them, and nothing else is said; otherwise they come to their end with the block."""
    pool = ProcessPoolExecutor(count, initializer=_let_ours_decide)
    try:
        yield pool
    except BaseException:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _let_ours_decide() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
