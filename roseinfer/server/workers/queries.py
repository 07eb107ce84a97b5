"""Queries between workers. The manager forwards them to all others, and adds its own answers."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.workers.messages import ForwardedQuery, FromWorker, PeerAnswers, PeerQuery, QueryAnswer
from roseinfer.server.workers.scrapes import WorkerPeer

# A worker that does not answer in time is left out.
ANSWER_TIMEOUT_S = 1.0
# A worker waits this long for the manager.
MANAGER_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Pending:
    asker: WorkerPeer
    query: PeerQuery
    waiting: set[int]
    answers: list[bytes] = field(default_factory=list)


class QueryForwarder:
    """The manager's side: forwards a query to all other workers, and their answers back as one message.

    `own`: answers of the manager itself.
    """

    def __init__(self, own: PeerQueries) -> None:
        self._own = own
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}

    def start(self, asker: WorkerPeer, query: PeerQuery, others: Iterable[WorkerPeer]) -> None:
        """Forward a query, and reply to `asker` when all `others` have answered, or after a timeout."""
        number = next(self._numbers)
        pending = self._pending[number] = _Pending(asker, query, set())
        own = self._own.answer(query.topic, query.body)
        if own is not None:
            pending.answers.append(own)
        for other in others:
            pending.waiting.add(other.number)
            other.send(ForwardedQuery(number, query.topic, query.body))
        asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, self._reply, number)
        self._reply_if_complete(number)

    def on_answer(self, peer: WorkerPeer, message: QueryAnswer) -> None:
        pending = self._pending.get(message.number)
        if pending is None:
            return  # after the timeout
        if message.body is not None:
            pending.answers.append(message.body)
        pending.waiting.discard(peer.number)
        self._reply_if_complete(message.number)

    def on_end(self, peer: WorkerPeer) -> None:
        """Do not wait for a worker that has ended."""
        for number, pending in list(self._pending.items()):
            pending.waiting.discard(peer.number)
            self._reply_if_complete(number)

    def _reply_if_complete(self, number: int) -> None:
        if not self._pending[number].waiting:
            self._reply(number)

    def _reply(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.asker.send(PeerAnswers(pending.query.number, pending.answers))


class WorkerPeerQueries(PeerQueries):
    """A worker's side: asks the manager and the other workers."""

    def __init__(self, send: Callable[[FromWorker], None]) -> None:
        super().__init__()
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[list[bytes]]] = {}

    async def ask(self, topic: str, body: bytes) -> list[bytes]:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(PeerQuery(number, topic, body))
        try:
            async with asyncio.timeout(MANAGER_TIMEOUT_S):
                return await waiting
        except TimeoutError:
            return []
        finally:
            del self._waiting[number]

    def on_query(self, message: ForwardedQuery) -> None:
        self._send(QueryAnswer(message.number, self.answer(message.topic, message.body)))

    def on_answers(self, message: PeerAnswers) -> None:
        waiting = self._waiting.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.answers)
