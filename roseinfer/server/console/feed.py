"""A feed: server-sent events for one reader, written as fast as it takes them and no faster."""

import asyncio
import time
from typing import Any, Protocol

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roseinfer.server.http.connection import EXTENSION, ClientConnection
from roseinfer.server.http.errors import ApiError, unavailable
from roseinfer.server.request.lifecycle import Guard, Lifecycle
from roseinfer.server.request.receivers import EventStream

INTERVAL_S = 0.25
# In one process that answers requests.
MAX_FEEDS = 16
CROWDED_RETRY_S = 5.0
_FILLER = b":\n\n"


class Reader(Protocol):
    """What one feed is told."""

    def hello(self) -> dict[str, Any]:
        """Raises `ApiError` 503 while there is nothing to tell."""
        ...

    async def tick(self) -> dict[str, Any]:
        """What is new since the last one."""
        ...


class Feeds:
    """All feeds of a process. They have no place among the requests, and end as soon as the server is to end."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._open: dict[Guard, None] = {}
        lifecycle.on_end(self._end)

    def __len__(self) -> int:
        return len(self._open)

    def answer(self, reader: Reader) -> Response:
        """Raises `ApiError` 503: too many feeds, or the server is loading or about to end."""
        refusal = self._lifecycle.refusal()
        if refusal is not None and refusal.code != "queue_full":
            raise refusal
        if len(self._open) >= MAX_FEEDS:
            raise unavailable("too_many_feeds", f"{MAX_FEEDS} consoles are open, the limit", CROWDED_RETRY_S)
        return _Feed(self._open, reader, reader.hello())

    def _end(self, cause: ApiError) -> None:
        for guard in list(self._open):
            guard.interrupt(cause)


class _Feed(Response):
    """What a reader does not take is not made: while it is slow nothing is asked for, and the next tick leaves out what
    is too much by then. One that takes nothing is cut off as every other client is.
    """

    def __init__(self, open_feeds: dict[Guard, None], reader: Reader, hello: dict[str, Any]) -> None:
        super().__init__()
        self._open = open_feeds
        self._reader = reader
        self._hello = hello

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A connection refers to the scope: leaving it there would make a reference cycle.
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
                await events.close(b"")
            else:  # the server does not wait for somebody who takes nothing of what is old by now
                wire.abort()
        finally:
            wire.on_disconnect(None)
            del self._open[guard]

    async def _write(self, events: EventStream) -> None:
        await events.write(event("hello", self._hello))
        while True:
            began_s = time.monotonic()
            await events.write(event("tick", await self._reader.tick()))
            await asyncio.sleep(max(0.0, began_s + INTERVAL_S - time.monotonic()))


def event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
