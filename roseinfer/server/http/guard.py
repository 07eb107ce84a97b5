"""Lets others end what a task is doing: the client by leaving, the server by shutting down."""

import asyncio
from types import TracebackType


class Guard:
    """`with guard:` around the work of the current task. The first cause given to `interrupt` is raised out of it.

    The task itself is cancelled, as `asyncio.timeout` does it: a second task to watch over the first would cost every
    request more than its own bookkeeping.
    """

    def __init__(self) -> None:
        self._cause: Exception | None = None
        self._task: asyncio.Task[object] | None = None

    def interrupt(self, cause: Exception) -> None:
        if self._cause is None:
            self._cause = cause
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> None:
        if self._cause is not None:
            raise self._cause
        self._task = asyncio.current_task()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None, "entered first"
        if self._cause is None:
            return
        # `interrupt` found the task waiting, so its cancellation has arrived here. Others may have cancelled it too.
        if task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._cause from None
