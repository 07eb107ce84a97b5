"""Tests in one event loop: run until done, or for a minute."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

PATIENCE_S = 60.0


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run in an event loop. Raise `TimeoutError` after a minute."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)
