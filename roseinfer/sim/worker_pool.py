"""Processes that simulate."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from roseinfer.core.interrupts import sigint_blocked


@contextmanager
def worker_pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of `count`. Ctrl+C, which goes to all processes of a terminal, ends them at once with whoever waits for
    them, and nothing else is said; otherwise they come to their end with the block."""
    pool = _Pool(count, initializer=_ignore_interrupts)
    try:
        yield pool
    except BaseException:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


class _Pool(ProcessPoolExecutor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Processes that it starts have SIGINT blocked from the beginning, where they are forked."""
        with sigint_blocked():
            return super().submit(fn, *args, **more)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
