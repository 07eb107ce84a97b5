"""Progress reporting for long operations. Listeners are optional; without one a report costs nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

# Arguments: the operation, parts done, parts in all (0 = unknown). The operation "" means that it is over.
Listener = Callable[[str, int, int], None]

_listeners: list[Listener] = []


def report(what: str, done: int = 0, total: int = 0) -> None:
    """Report progress. Call it within a `stage`; `what` may replace the name of the stage."""
    for listener in _listeners:
        listener(what, done, total)


@contextmanager
def stage(what: str) -> Iterator[Callable[[int, int], None]]:
    """Report an operation as running within this context. Yield a function that reports (done, total)."""
    report(what)
    try:
        yield partial(report, what)
    finally:
        report("")


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send all reports of this process to `listener`, in the thread that makes them."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
