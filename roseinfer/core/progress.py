"""Who works for long says how far it is, and somebody may listen; nobody does by default, and it costs nothing then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

# What is being done, and how many of how many parts of it are; 0 parts = nobody knows. "" = it is over.
Listener = Callable[[str, int, int], None]

_listeners: list[Listener] = []


def report(what: str, done: int = 0, total: int = 0) -> None:
    """To be called within a `stage`, whose name `what` may replace."""
    for listener in _listeners:
        listener(what, done, total)


@contextmanager
def stage(what: str) -> Iterator[Callable[[int, int], None]]:
    """What is done inside may take a while. Yields a function that is to be told (done, total)."""
    report(what)
    try:
        yield partial(report, what)
    finally:
        report("")


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`listener` is told of all reports of this process, in the thread that makes them."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
