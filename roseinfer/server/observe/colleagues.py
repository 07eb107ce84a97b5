"""The other processes of the same server, as each of them sees them: whoever is asked can tell what all know."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

# From the body of a question to that of the answer.
Handler = Callable[[bytes], bytes]


class Colleagues:
    """Questions have a topic and a body, which its handlers understand. Here there is nobody else to ask: a server of
    one process. `fleet` has those of several.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def on(self, topic: str, handler: Handler) -> None:
        """What others ask about `topic` is answered by `handler`, at once and in the event loop."""
        self._handlers[topic] = handler

    def answer(self, topic: str, body: bytes) -> bytes | None:
        """To a colleague; None: nothing is known here."""
        handler = self._handlers.get(topic)
        if handler is None:
            return None
        try:
            return handler(body)
        except Exception:
            log.exception("a question about %s could not be answered", topic)
            return None

    async def ask(self, topic: str, body: bytes) -> list[bytes]:
        """The answers of all others that know something and can answer now, in no order."""
        return []
