"""Threads for work of a bounded size outside the event loop."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

MAX_THREADS = 4

Args = ParamSpec("Args")
Result = TypeVar("Result")
_Entry = tuple["asyncio.Future[object]", Callable[[], object]]


class Offload:
    """A few daemon threads for blocking work. The process exits without waiting for them.

    Their queue is bounded by the number of requests that the server admits. Work that is cancelled before it has
    started does not run.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self._started = 0
        self._closed = False

    async def run(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """Return the result of `work`. Raises its errors, panics of libraries included."""
        return await self.start(work, *args, **kwargs)

    def start(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> "asyncio.Future[Result]":
        """Queue the work and return the future of its result."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if self._started < self.threads:
            self._started += 1
            threading.Thread(target=self._serve, name=f"roseinfer-text_{self._started}", daemon=True).start()
        self._entries.put((future, lambda: work(*args, **kwargs)))  # type: ignore[arg-type]
        return future

    def close(self) -> None:
        self._closed = True
        for _ in range(self._started):
            self._entries.put(None)

    def _serve(self) -> None:
        while (entry := self._entries.get()) is not None and not self._closed:
            _run(*entry)
            del entry  # which holds arguments and result


def _run(future: "asyncio.Future[object]", work: Callable[[], object]) -> None:
    if future.cancelled():
        return
    try:
        result = work()
    except BaseException as error:  # passed on to the caller, panics included
        _give(future, future.set_exception, error)
    else:
        _give(future, future.set_result, result)


def _give(future: "asyncio.Future[object]", give: Callable[..., None], outcome: object) -> None:
    def deliver() -> None:
        if not future.done():
            give(outcome)

    with contextlib.suppress(RuntimeError):  # the event loop is closed
        future.get_loop().call_soon_threadsafe(deliver)
