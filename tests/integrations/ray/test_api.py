"""What an API process of a deployment tells a directory that was started again."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from roseinfer.cluster.directory import DynamicDirectory
from roseinfer.core.clock import ManualClock
from roseinfer.integrations.ray import api
from roseinfer.integrations.ray.register import SETTLE_S, Register


def method(call: Callable[..., Any]) -> SimpleNamespace:
    """As an actor of Ray has it."""

    async def remote(*given: Any) -> Any:
        return call(*given)

    return SimpleNamespace(remote=remote)


class Directory:
    """An actor that can be asked so many times, and then is away."""

    def __init__(self, register: Register, answers: int, *, old: bool = False) -> None:
        self.register, self.answers = register, answers
        self.engines = method(self._engines)
        if not old:
            self.known = method(register.known)

    def _engines(self, seen: int, patience_s: float) -> tuple[int, list[Any]]:
        self.answers -= 1
        if self.answers < 0:
            raise ConnectionError("it has died")
        return self.register.version, self.register.engines()


@pytest.mark.parametrize("old", [False, True])
def test_a_directory_that_was_started_again_hears_which_numbers_are_taken(old: bool, monkeypatch) -> None:
    """Though the engine that has one is away just then. One of an earlier version cannot be told, and is followed."""
    monkeypatch.setattr(api, "PAUSE_S", 0.0)
    clock = ManualClock()
    before, after = Register(clock), Register(clock, first_version=100, anew=True)
    for number in range(3):
        before.tell(f"a:{number}", str(number), None, False)
    directories = [Directory(before, 1), Directory(after, 2, old=old)]
    told = DynamicDirectory()

    async def directory() -> Directory:
        return directories[0] if directories[0].answers >= 0 else directories[1]

    async def main() -> None:
        monkeypatch.setattr(api, "directory", directory)
        following = asyncio.create_task(api.ApiReplica._follow(SimpleNamespace(_told=told)))
        async with asyncio.timeout(10):
            while directories[1].answers == 2:
                await asyncio.sleep(0)
        following.cancel()

    asyncio.run(main())
    clock.advance(SETTLE_S)
    assert after.tell("a:9", "new", None, False) == (0 if old else 3)
