"""Queries between workers. The manager forwards them to all others, and adds its own answers."""

from collections.abc import Callable, Iterable

from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.workers.messages import ForwardedQuery, FromWorker, PeerAnswers, PeerQuery, QueryAnswer
from roseinfer.server.workers.replies import FanOut, ManagerRequests, WorkerPeer


class QueryForwarder:
    """The manager's side: forwards a query to all other workers, and their answers back as one message.

    `own`: answers of the manager itself.
    """

    def __init__(self, own: PeerQueries) -> None:
        self._own = own
        self._forwarded = FanOut[bytes | None]()

    def start(self, asker: WorkerPeer, query: PeerQuery, others: Iterable[WorkerPeer]) -> None:
        """Forward a query, and reply to `asker` when all `others` have answered, or after a timeout."""
        own = self._own.answer(query.topic, query.body)

        def reply(answers: list[bytes | None]) -> None:
            known = [answer for answer in (own, *answers) if answer is not None]
            asker.send(PeerAnswers(query.number, known))

        self._forwarded.start(others, lambda number: ForwardedQuery(number, query.topic, query.body), reply)

    def on_answer(self, peer: WorkerPeer, message: QueryAnswer) -> None:
        self._forwarded.on_reply(peer, message.number, message.body)

    def on_end(self, peer: WorkerPeer) -> None:
        """Do not wait for a worker that has ended."""
        self._forwarded.on_end(peer)


class WorkerPeerQueries(PeerQueries):
    """A worker's side: asks the manager and the other workers."""

    def __init__(self, send: Callable[[FromWorker], None]) -> None:
        super().__init__()
        self._send = send
        self._asked = ManagerRequests[list[bytes]](send)

    async def ask(self, topic: str, body: bytes) -> list[bytes]:
        try:
            return await self._asked.ask(lambda number: PeerQuery(number, topic, body))
        except TimeoutError:
            return []

    def on_query(self, message: ForwardedQuery) -> None:
        self._send(QueryAnswer(message.number, self.answer(message.topic, message.body)))

    def on_answers(self, message: PeerAnswers) -> None:
        self._asked.on_reply(message.number, message.answers)
