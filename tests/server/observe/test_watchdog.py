"""Watchdog that ends requests when the engine hangs."""

import asyncio
import time

import pytest

from roseinfer.server.http.errors import unavailable
from roseinfer.server.observe.watchdog import watch_engine


class Sick:
    """Service with a dead or hung engine, and the errors it received."""

    def __init__(self, returning: bool) -> None:
        self.config, self.lifecycle = self, self
        self.stall_timeout = 0.4  # a look every 100 ms
        self.returning = returning
        self.interrupted = 0
        self.looked = 0

    def ill_health(self) -> Exception:
        self.looked += 1
        return unavailable("engine_unhealthy", "no engine", 1.0)

    def interrupt_all(self, cause: Exception) -> int:
        self.interrupted += 1
        return 1


@pytest.mark.parametrize(("returning", "ended"), [(False, True), (True, False)])
def test_requests_are_ended_unless_the_engine_is_being_started_again(returning: bool, ended: bool) -> None:
    async def watch() -> None:
        watching = asyncio.create_task(watch_engine(sick))  # type: ignore[arg-type]
        while sick.looked < 3:
            await asyncio.sleep(0.001)
        watching.cancel()

    sick = Sick(returning)
    asyncio.run(watch())
    assert bool(sick.interrupted) is ended


def test_a_suspended_process_checks_twice() -> None:
    """After a suspension (Ctrl+Z) the engine's output is read before requests are ended."""

    async def watch() -> None:
        watching = asyncio.create_task(watch_engine(sick))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        time.sleep(2 * sick.stall_timeout)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not sick.looked
        while sick.looked < 2:
            await asyncio.sleep(0.001)
        watching.cancel()

    sick = Sick(False)
    asyncio.run(watch())
    assert sick.interrupted
