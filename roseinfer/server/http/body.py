"""JSON bodies: reading those of requests under limits, and writing those of answers."""

import asyncio
import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roseinfer.server.http.connection import EXTENSION, ClientConnection
from roseinfer.server.http.errors import (
    OPENAI,
    ApiError,
    Dialect,
    bad_request,
    body_too_large,
    body_too_slow,
    compressed_body,
    not_json,
    too_many_bodies,
    too_many_values,
)
from roseinfer.server.http.limits import Limits

# Time and size of the rest of a body that is read and discarded when the answer is sent before it has arrived.
LINGER_S = 2.0
LINGER_BYTES = 64 * 2**20


class _Reader:
    """Body that is arriving. `rejection`: why another part of the server ended it."""

    __slots__ = ("began_s", "bytes", "rejection", "timeout")

    def __init__(self, timeout: asyncio.Timeout, began_s: float) -> None:
        self.timeout = timeout
        self.began_s = began_s
        self.bytes = 0
        self.rejection: ApiError | None = None

    def end(self, rejection: ApiError, now_s: float) -> None:
        if not self.timeout.expired():
            self.rejection = rejection
            self.timeout.reschedule(now_s)


class BodyReaders:
    """Reader of request bodies.

    Bodies that do not arrive with their heads are bounded in number and bytes, separately from admitted requests. So
    slow clients only compete with other slow clients. `on_rejected` is called for each body above the bound.
    """

    def __init__(self, on_rejected: Callable[[], None]) -> None:
        self.bytes = 0
        self._on_rejected = on_rejected
        self._readers: dict[_Reader, None] = {}
        self._stopped: ApiError | None = None

    @property
    def arriving(self) -> int:
        """Number of bodies that have not fully arrived."""
        return len(self._readers)

    async def read_json(self, scope: Scope, receive: Receive, limits: Limits) -> dict[str, Any]:
        """Return the body as a JSON object.

        Raise `ApiError` 400 (not JSON, not an object), 408 (too slow), 413 (too large by Content-Length or while
        reading, or too many values), 415 (wrong content type, or compressed) or 503 (too many arriving bodies), or
        `ClientDisconnect`.
        """
        headers = dict(scope["headers"])
        _check_content(headers)
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limits.max_body_bytes:
            raise body_too_large(limits.max_body_bytes)
        connection: ClientConnection = scope["extensions"][EXTENSION]
        if connection.body_complete:  # the usual case
            data = await _read_body(receive, limits.max_body_bytes)
        else:
            data = await self._read_slowly(receive, limits)
        check_counts(data, limits)
        return parse_object(data)

    def stop(self, cause: ApiError) -> None:
        """End all arriving bodies and reject later ones."""
        self._stopped = cause
        now_s = asyncio.get_running_loop().time()
        for reader in self._readers:
            reader.end(cause, now_s)

    async def _read_slowly(self, receive: Receive, limits: Limits) -> bytes:
        if self._stopped is not None:
            raise self._stopped
        now_s = asyncio.get_running_loop().time()
        crowded = len(self._readers) >= limits.max_body_readers and not self._evict_oldest(limits, now_s)
        timeout = asyncio.timeout(limits.brief_body_s if crowded else limits.body_timeout_s)
        reader = _Reader(timeout, now_s)
        self._readers[reader] = None
        try:
            async with timeout:
                return await _read_body(receive, limits.max_body_bytes, partial(self._count, reader, limits))
        except TimeoutError:
            if crowded and reader.rejection is None:
                raise self._too_many() from None
            raise reader.rejection or body_too_slow(limits.body_timeout_s) from None
        finally:
            self._remove(reader)

    def _count(self, reader: _Reader, limits: Limits, size: int) -> None:
        reader.bytes += size
        self.bytes += size
        while self.bytes > limits.max_arriving_bytes and reader in self._readers:
            if not self._evict_oldest(limits, asyncio.get_running_loop().time()):
                raise self._too_many()

    def _evict_oldest(self, limits: Limits, now_s: float) -> bool:
        """End the oldest body if its grace time is over. Return True if one was ended."""
        oldest = next(iter(self._readers), None)
        if oldest is None or now_s - oldest.began_s < limits.body_grace_s:
            return False
        self._remove(oldest)
        oldest.end(body_too_slow(now_s - oldest.began_s), now_s)
        return True

    def _too_many(self) -> ApiError:
        self._on_rejected()
        return too_many_bodies()

    def _remove(self, reader: _Reader) -> None:
        if reader in self._readers:
            del self._readers[reader]
            self.bytes -= reader.bytes


def _check_content(headers: Mapping[bytes, bytes]) -> None:
    """Raise `ApiError` 415 for other types or codings. Browsers send JSON to another origin only after a preflight."""
    value = headers.get(b"content-type", b"")
    kind = value.partition(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise not_json(value.decode("latin-1"))
    coding = headers.get(b"content-encoding", b"identity")
    if coding.strip().lower() not in (b"", b"identity"):
        raise compressed_body(coding.decode("latin-1"))


async def _read_body(receive: Receive, limit: int, count: Callable[[int], None] | None = None) -> bytes:
    """Return the body. `count`, if given, is called with the size of each part, and may raise."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise body_too_large(limit)
        if count is not None:
            count(len(part))
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


# --- limits on the JSON: before parsing, because parsing and validation block the event loop -----------------------
def check_counts(data: bytes, limits: Limits) -> None:
    """Raise `ApiError` 413 for too many objects, lists, strings or values.

    Delimiters are counted first, which takes a millisecond for 1 MiB; they are an upper bound. Only if they exceed a
    limit, those within strings are excluded.
    """
    # Each object, list or string takes at least two bytes.
    if len(data) <= 2 * min(limits.max_json_objects, limits.max_json_lists, limits.max_json_strings):
        return
    if _exceeded(data, data.count(b'"') // 2, limits) is None:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes delimit strings
    strings = plain.count(b'"') // 2
    if strings <= limits.max_json_strings:  # otherwise splitting would make too many pieces
        plain = b"".join(plain.split(b'"')[::2])
    rejection = _exceeded(plain, strings, limits)
    if rejection is not None:
        raise rejection


def _exceeded(data: bytes, strings: int, limits: Limits) -> ApiError | None:
    """Return the error for the first exceeded limit. `data`: JSON, ideally without the contents of strings."""
    if strings > limits.max_json_strings:
        return too_many_values(limits.max_json_strings, "strings and names of fields")
    if data.count(b"{") > limits.max_json_objects:
        return too_many_values(limits.max_json_objects, "objects")
    if data.count(b"[") > limits.max_json_lists:
        return too_many_values(limits.max_json_lists, "lists")
    if data.count(b",") > limits.max_json_values:
        return too_many_values(limits.max_json_values, "values")
    return None


def parse_object(data: bytes) -> dict[str, Any]:
    # A body of millions of small lists would trigger one full garbage collection after another.
    was_on = gc.isenabled()
    gc.disable()
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error.msg} at byte {error.pos}") from None
    finally:
        if was_on:
            gc.enable()
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object")
    return value


# --- answers ----------------------------------------------------------------------------------------------------
class JsonResponse(Response):
    """JSON response. `content` is anything that orjson can encode, or encoded JSON as bytes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else orjson.dumps(content)


class ErrorResponse(JsonResponse):
    """Error response in the format of the API that was called."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, error.headers())
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect: Dialect = scope.get("state", {}).get("dialect", OPENAI)
        if dialect is not OPENAI:
            self.body = dialect.error_body(self._error)
            self.headers["content-length"] = str(len(self.body))
        if not self._error.closes:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _discard_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard_body(receive: Receive) -> None:
    """Read for a moment: closing while the client still sends would reset the connection and lose the answer."""
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
