"""Feed of server-sent events for one console, at most as fast as it reads."""

import asyncio
import time
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roseinfer.server.console.reader import ConsoleReader
from roseinfer.server.http.connection import EXTENSION, ClientConnection
from roseinfer.server.http.errors import ApiError, unavailable
from roseinfer.server.request.lifecycle import Guard, Lifecycle
from roseinfer.server.request.receivers import EventStream

INTERVAL_S = 0.25
# Per API process.
MAX_FEEDS = 16
CROWDED_RETRY_S = 5.0
_FILLER = b":\n\n"


class Feeds:
    """All feeds of a process. They hold no tickets, and end when the shutdown begins."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._open: dict[Guard, None] = {}
        lifecycle.on_end(self._end)

    def __len__(self) -> int:
        return len(self._open)

    def answer(self, source: ConsoleReader) -> Response:
        """Return a new feed. Raises `ApiError` 503 for too many feeds, or while loading or shutting down."""
        refusal = self._lifecycle.refusal()
        if refusal is not None and refusal.code != "queue_full":
            raise refusal
        if len(self._open) >= MAX_FEEDS:
            raise unavailable(
                "too_many_feeds", f"The server is at its limit of open consoles ({MAX_FEEDS})", CROWDED_RETRY_S
            )
        return _Feed(self._open, source, source.hello())

    def _end(self, cause: ApiError) -> None:
        for guard in list(self._open):
            guard.interrupt(cause)


class _Feed(Response):
    """Response with one feed. While its client reads slowly no tick is made; a client that stops reading is cut."""

    def __init__(self, open_feeds: dict[Guard, None], source: ConsoleReader, hello: dict[str, Any]) -> None:
        super().__init__()
        self._open = open_feeds
        self._source = source
        self._hello = hello

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The connection refers to the scope: keeping it there would be a reference cycle.
        wire: ClientConnection = scope["extensions"].pop(EXTENSION)
        events, guard = EventStream(send, wire, _FILLER), Guard()
        self._open[guard] = None
        wire.on_disconnect(lambda: guard.interrupt(ClientDisconnect()))
        try:
            with guard:
                await self._write(events)
        except ClientDisconnect:
            return
        except ApiError:
            if not events.started or events.open:
                await events.write(b"", last=True)
            else:  # the shutdown does not wait for a client that has stopped reading
                wire.abort()
        finally:
            wire.on_disconnect(None)
            del self._open[guard]

    async def _write(self, events: EventStream) -> None:
        await events.write(event("hello", self._hello))
        while True:
            began_s = time.monotonic()
            await events.write(event("tick", await self._source.tick()))
            await asyncio.sleep(max(0.0, began_s + INTERVAL_S - time.monotonic()))


def event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
