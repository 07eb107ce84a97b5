import asyncio
import threading
from collections.abc import Coroutine
from contextlib import closing
from typing import Any

import pytest

from roseinfer.server.text_work.offload import Offload


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


class Panic(BaseException):
    """Panic as Rust libraries raise it, no subclass of Exception."""


def test_results_and_errors_of_any_kind() -> None:
    def fail() -> None:
        raise Panic("index out of bounds")

    async def test() -> None:
        with closing(Offload(1)) as offload:
            assert await offload.run(int, "ff", base=16) == 255
            with pytest.raises(Panic, match="index"):
                await offload.run(fail)
            assert await offload.run(threading.current_thread) is not threading.current_thread()

    run(test())


def test_work_that_is_cancelled_before_it_starts_does_not_run() -> None:
    async def test() -> None:
        ran: list[str] = []
        go_on = threading.Event()
        with closing(Offload(1)) as offload:
            first = asyncio.create_task(offload.run(go_on.wait, 10))
            left = asyncio.create_task(offload.run(ran.append, "left"))
            stays = asyncio.create_task(offload.run(ran.append, "stays"))
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(first, stays)
        assert ran == ["stays"]

    run(test())
