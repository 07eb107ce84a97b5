"""Whole responses in JSON."""

import asyncio
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roseinfer.server.http.errors import ApiError

# How long an answer that came before the end of the body waits for the rest of it, and how much of it it takes.
LINGER_S = 2.0
LINGER_BYTES = 64 * 2**20


class JsonResponse(Response):
    """`content` is anything orjson takes, or bytes that are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else orjson.dumps(content)


class ErrorResponse(JsonResponse):
    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, error.headers())
        self._closes = error.closes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._closes:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _discard_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard_body(receive: Receive) -> None:
    """Read on for a moment: closing on a client that still sends would reset the connection and lose the answer."""
    taken = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while taken < LINGER_BYTES:
                message = await receive()
                taken += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
    except TimeoutError:
        return
