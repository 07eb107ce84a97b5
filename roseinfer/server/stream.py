"""The transport of a stream: headers held back until there is something to say, keep-alive comments, a hard end."""

from starlette.types import Send

from roseinfer.server.errors import ApiError

KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would hold tokens back.
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self._idle = True

    async def write(self, data: bytes) -> None:
        self._idle = False
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def keep_alive(self) -> None:
        """To be called at intervals: writes a comment if nothing was written since the last call."""
        if self._idle:
            await self.write(KEEP_ALIVE)
        self._idle = True

    async def close(self, data: bytes) -> None:
        """The proper end."""
        await self.write(data)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """An error event, and no end: the server cuts a response that its application left unfinished."""
        await self.write(b"data: " + error.body() + b"\n\n")
