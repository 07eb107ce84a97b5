"""Who works for long says how far it is, and somebody may listen; nobody does by default, and it costs nothing then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, int, int], None]

_listeners: list[Listener] = []


def report(what: str, done: int = 0, total: int = 0) -> None:
    """`what` is being done, and `done` of `total` parts of it are; `total` 0 = nobody knows."""
    for listener in _listeners:
        listener(what, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`listener` is told of all reports of this process, in the thread that makes them."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
