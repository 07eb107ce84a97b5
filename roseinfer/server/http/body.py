"""Bodies in JSON: those of requests, read under limits, and those of answers."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roseinfer.server.http.connection import EXTENSION, Wire
from roseinfer.server.http.errors import ApiError, bad_request, body_too_large, body_too_slow
from roseinfer.server.http.limits import Limits

# How long an answer that came before the end of the body waits for the rest of it, and how much of it it takes.
LINGER_S = 2.0
LINGER_BYTES = 64 * 2**20


async def read_json(scope: Scope, receive: Receive, limits: Limits) -> dict[str, Any]:
    """The body as a JSON object.

    Raises `ApiError` 400 (not JSON, not an object, wrong content type), 408 (too slow) or 413 (too large, noticed
    from Content-Length or while reading), and `ClientDisconnect`.
    """
    headers = dict(scope["headers"])
    _check_content_type(headers.get(b"content-type", b""))
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise body_too_large(limits.max_body_bytes)
    wire: Wire = scope["extensions"][EXTENSION]
    if wire.arrived:  # as most bodies are by now: nothing to wait for
        return _parse_object(await _read_body(receive, limits.max_body_bytes))
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return _parse_object(await _read_body(receive, limits.max_body_bytes))
    except TimeoutError:
        raise body_too_slow(limits.body_timeout_s) from None


def _check_content_type(value: bytes) -> None:
    kind = value.partition(b";")[0].strip().lower()
    if kind and kind != b"application/json" and not kind.endswith(b"+json"):
        raise bad_request("The content type must be application/json", "Content-Type")


async def _read_body(receive: Receive, limit: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise body_too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        with _no_collection():
            value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error.msg} at byte {error.pos}") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object")
    return value


@contextmanager
def _no_collection() -> Iterator[None]:
    """A body of millions of small lists would set off one full garbage collection after the other."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- answers ----------------------------------------------------------------------------------------------------
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
