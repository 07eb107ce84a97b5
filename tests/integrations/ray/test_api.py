"""API processes report taken engine numbers to a restarted directory."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from roseinfer.cluster.directory import DynamicDirectory
from roseinfer.core.clock import ManualClock
from roseinfer.integrations.ray import api
from roseinfer.integrations.ray.register import SETTLE_S, EngineRegistry
from roseinfer.server.http.connection import EXTENSION


def method(call: Callable[..., Any]) -> SimpleNamespace:
    """Return a method in the form of a Ray actor."""

    async def remote(*given: Any) -> Any:
        return call(*given)

    return SimpleNamespace(remote=remote)


class FailingDirectory:
    """Directory actor that answers this many calls and then fails."""

    def __init__(self, registry: EngineRegistry, answers: int) -> None:
        self.registry, self.answers = registry, answers
        self.engines = method(self._engines)
        self.reserve = method(registry.reserve)

    def _engines(self, seen: int, timeout_s: float) -> tuple[int, list[Any]]:
        self.answers -= 1
        if self.answers < 0:
            raise ConnectionError("the actor has died")
        return self.registry.version, self.registry.engines()


def test_a_restarted_directory_learns_which_numbers_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their engines need not have registered again."""
    monkeypatch.setattr(api, "RETRY_PAUSE_S", 0.0)
    clock = ManualClock()
    before, after = EngineRegistry(clock), EngineRegistry(clock, first_version=100, restarted=True)
    for number in range(3):
        before.register(f"a:{number}", str(number), None, False)
    directories = [FailingDirectory(before, 1), FailingDirectory(after, 2)]
    engines = DynamicDirectory()

    async def directory() -> FailingDirectory:
        return directories[0] if directories[0].answers >= 0 else directories[1]

    async def main() -> None:
        monkeypatch.setattr(api, "directory", directory)
        following = asyncio.create_task(api.follow_directory(engines))
        async with asyncio.timeout(10):
            while directories[1].answers == 2:
                await asyncio.sleep(0)
        following.cancel()

    asyncio.run(main())
    clock.advance(SETTLE_S)
    assert after.register("a:9", "new", None, False) == 3


def test_responses_name_the_deployment_and_one_request_id() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Request-Id", b"1"), (b"a", b"b")]})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "extensions": {EXTENSION: {}}}
    asyncio.run(api.HaproxyOnly(app, "abc")(scope, receive, send))
    assert sent[0]["headers"] == [(b"a", b"b"), (b"x-roseinfer-deployment", b"abc")]
