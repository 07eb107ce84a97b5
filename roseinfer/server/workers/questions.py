"""What workers ask each other: through the manager, which knows all of them and has answers of its own."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.workers.control import Answer, Answers, Ask, FromWorker, Question
from roseinfer.server.workers.scrapes import Peer

# A worker that does not answer for so long is left out.
PATIENCE_S = 1.0
# The manager itself does not answer a worker that has waited so long.
MANAGER_PATIENCE_S = 5.0


@dataclass(slots=True)
class _Pending:
    asker: Peer
    ask: Ask
    waiting: set[int]
    answers: list[bytes] = field(default_factory=list)


class Questions:
    """At the manager: passes each on to all others, and their answers back as one. `own`: what the manager knows."""

    def __init__(self, own: PeerQueries) -> None:
        self._own = own
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}

    def ask(self, asker: Peer, ask: Ask, others: Iterable[Peer]) -> None:
        """Answers `asker` when all `others` have told what they know, or had time to."""
        number = next(self._numbers)
        pending = self._pending[number] = _Pending(asker, ask, set())
        own = self._own.answer(ask.topic, ask.body)
        if own is not None:
            pending.answers.append(own)
        for other in others:
            pending.waiting.add(other.number)
            other.send(Question(number, ask.topic, ask.body))
        asyncio.get_running_loop().call_later(PATIENCE_S, self._answer, number)
        self._answer_if_complete(number)

    def told(self, peer: Peer, message: Answer) -> None:
        pending = self._pending.get(message.number)
        if pending is None:
            return  # too late
        if message.body is not None:
            pending.answers.append(message.body)
        pending.waiting.discard(peer.number)
        self._answer_if_complete(message.number)

    def gone(self, peer: Peer) -> None:
        for number, pending in list(self._pending.items()):
            pending.waiting.discard(peer.number)
            self._answer_if_complete(number)

    def _answer_if_complete(self, number: int) -> None:
        if not self._pending[number].waiting:
            self._answer(number)

    def _answer(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.asker.send(Answers(pending.ask.number, pending.answers))


class OtherWorkers(PeerQueries):
    """At a worker: the manager and the other workers."""

    def __init__(self, send: Callable[[FromWorker], None]) -> None:
        super().__init__()
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[list[bytes]]] = {}

    async def ask(self, topic: str, body: bytes) -> list[bytes]:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, topic, body))
        try:
            async with asyncio.timeout(MANAGER_PATIENCE_S):
                return await waiting
        except TimeoutError:
            return []
        finally:
            del self._waiting[number]

    def asked(self, message: Question) -> None:
        """By another worker."""
        self._send(Answer(message.number, self.answer(message.topic, message.body)))

    def told(self, message: Answers) -> None:
        """What the others have answered."""
        waiting = self._waiting.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.answers)
