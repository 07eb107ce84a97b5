"""Bounded queue of text work. A cancelled job leaves it."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from roseinfer.server.http.errors import ApiError, unavailable

Result = TypeVar("Result")

MAX_RETRY_S = 10.0


class Lane:
    """Queue that runs up to `runners` jobs at a time, in order of arrival.

    `max_size`: limit in characters for all jobs that wait or run; one job is always admitted. `max_s`: time limit for a
    job, its wait included. `kills`: a running job is cancelled when its caller leaves; otherwise it runs to its end and
    keeps its place. `on_refused` is called for each job that finds the queue full.
    """

    def __init__(
        self,
        runners: int,
        max_size: int,
        on_refused: Callable[[], None],
        *,
        max_s: float | None = None,
        kills: bool = False,
    ) -> None:
        self.size = 0
        self._free = runners
        self._max_size = max_size
        self._on_refused = on_refused
        self._max_s = max_s
        self._kills = kills
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._refusal: ApiError | None = None

    async def run(self, size: int, start: Callable[[], "asyncio.Future[Result]"]) -> Result:
        """Call `start` when it is the job's turn, and return the result. `size`: in characters.

        Raises the error of the work, `ApiError` 503 if the queue is full or the job takes too long, and the cause that
        was passed to `refuse`.
        """
        if self._max_s is None:
            return await self._run(size, start)
        try:
            async with asyncio.timeout(self._max_s):
                return await self._run(size, start)
        except TimeoutError:
            raise self._full() from None

    def refuse(self, cause: ApiError) -> None:
        """Fail waiting jobs and all later ones."""
        self._refusal = cause
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            if not turn.done():
                turn.set_exception(cause)

    async def _run(self, size: int, start: Callable[[], "asyncio.Future[Result]"]) -> Result:
        if self._refusal is not None:
            raise self._refusal
        if self.size and self.size + size > self._max_size:
            raise self._full()
        self.size += size
        try:
            if self._free:
                self._free -= 1
            else:
                await self._turn()
        except BaseException:
            self.size -= size
            raise
        running = start()
        running.add_done_callback(partial(self._on_done, size))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if self._kills:
                running.cancel()
            raise

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled() and turn.exception() is None:
                self._pass_on()  # its turn came at the same moment
            raise

    def _on_done(self, size: int, done: "asyncio.Future[Any]") -> None:
        self.size -= size
        if not done.cancelled():
            done.exception()  # its caller may have left
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _full(self) -> ApiError:
        self._on_refused()
        wait_s = min(1.0 + self.size / 2**21, MAX_RETRY_S)
        return unavailable("text_queue_full", "Too much text is waiting to be tokenised", wait_s)
