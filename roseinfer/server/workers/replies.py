"""Numbered messages between the manager and its workers, and the wait for their replies."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from roseinfer.server.workers.messages import FromManager, FromWorker

# The manager goes on without a worker that does not reply in time.
WORKER_TIMEOUT_S = 1.0
# A worker waits this long for the manager.
MANAGER_TIMEOUT_S = 5.0

Reply = TypeVar("Reply")


class WorkerPeer(Protocol):
    """Interface of `WorkerProcess`, which tests replace."""

    number: int

    def send(self, message: FromManager) -> None: ...


@dataclass(slots=True)
class _Pending(Generic[Reply]):
    finish: Callable[[list[Reply]], None]
    waiting: set[int] = field(default_factory=set)
    replies: list[Reply] = field(default_factory=list)


class FanOut(Generic[Reply]):
    """The manager's messages to several workers at once."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending[Reply]] = {}

    def start(
        self,
        peers: Iterable[WorkerPeer],
        message: Callable[[int], FromManager],
        finish: Callable[[list[Reply]], None],
    ) -> None:
        """Send `message` of a new number to `peers`. Call `finish` when all have replied, or after a timeout."""
        number = next(self._numbers)
        pending = self._pending[number] = _Pending(finish)
        for peer in peers:
            pending.waiting.add(peer.number)
            peer.send(message(number))
        asyncio.get_running_loop().call_later(WORKER_TIMEOUT_S, self._finish, number)
        self._finish_if_complete(number)

    def on_reply(self, peer: WorkerPeer, number: int, reply: Reply) -> None:
        """Take a reply. Ignored after the timeout."""
        pending = self._pending.get(number)
        if pending is not None:
            pending.replies.append(reply)
            pending.waiting.discard(peer.number)
            self._finish_if_complete(number)

    def on_end(self, peer: WorkerPeer) -> None:
        """Do not wait for a worker that has ended."""
        for number, pending in list(self._pending.items()):
            pending.waiting.discard(peer.number)
            self._finish_if_complete(number)

    def _finish_if_complete(self, number: int) -> None:
        if not self._pending[number].waiting:
            self._finish(number)

    def _finish(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.finish(pending.replies)


class ManagerRequests(Generic[Reply]):
    """A worker's requests to the manager."""

    def __init__(self, send: Callable[[FromWorker], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    async def ask(self, message: Callable[[int], FromWorker]) -> Reply:
        """Send `message` of a new number and return the reply. Raises `TimeoutError`."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(message(number))
        try:
            async with asyncio.timeout(MANAGER_TIMEOUT_S):
                return await waiting
        finally:
            del self._waiting[number]

    def on_reply(self, number: int, reply: Reply) -> None:
        """Take a reply. Ignored after the timeout."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
