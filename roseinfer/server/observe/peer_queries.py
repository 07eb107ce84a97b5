"""Queries between the API processes of one server, so that each can answer for all."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

# Maps the body of a query to that of the answer.
Handler = Callable[[bytes], bytes]


class PeerQueries:
    """Queries by topic. This class is for a server of one process: it has no peers. `workers` overrides `ask`."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def on(self, topic: str, handler: Handler) -> None:
        """Answer queries of other processes about `topic` with `handler`, called in the event loop."""
        self._handlers[topic] = handler

    def answer(self, topic: str, body: bytes) -> bytes | None:
        """Return the answer to another process; None if there is none."""
        handler = self._handlers.get(topic)
        if handler is None:
            return None
        try:
            return handler(body)
        except Exception:
            log.exception("cannot answer a query about %s", topic)
            return None

    async def ask(self, topic: str, body: bytes) -> list[bytes]:
        """Return the answers of all other processes that respond in time, in any order."""
        return []
