"""Runs the work of one request while watching for the client's leaving."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive


class Supervisor:
    """`run` ends with the work, or with the cause that somebody gave to `interrupt` first."""

    def __init__(self) -> None:
        self._cause: Exception | None = None
        self._work: asyncio.Task[None] | None = None

    def interrupt(self, cause: Exception) -> None:
        if self._cause is None:
            self._cause = cause
            if self._work is not None:
                self._work.cancel()

    async def run(
        self,
        work: Coroutine[Any, Any, None],
        receive: Receive,
        idle: Callable[[], Awaitable[None]] | None = None,
        idle_interval_s: float = 0.0,
    ) -> None:
        """Awaits `work`; calls `idle` every `idle_interval_s` seconds if that is positive.

        Raises what `work` raises, `ClientDisconnect`, or the cause of an interruption.
        """
        if self._cause is not None:
            work.close()
            raise self._cause
        self._work = asyncio.create_task(work)
        watcher = asyncio.create_task(self._watch(receive, idle, idle_interval_s))
        try:
            await self._work
        except asyncio.CancelledError:
            if self._cause is None:
                raise
            raise self._cause from None
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})

    async def _watch(self, receive: Receive, idle: Callable[[], Awaitable[None]] | None, interval_s: float) -> None:
        timeout_s = interval_s if idle is not None and interval_s > 0 else None
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    message = await receive()
            except TimeoutError:
                assert idle is not None
                await idle()
                continue
            if message["type"] == "http.disconnect":
                self.interrupt(ClientDisconnect())
                return
