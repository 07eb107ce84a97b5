"""API keys: every path needs one, except those of a short list."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from roseinfer.server.http.body import ErrorResponse
from roseinfer.server.http.errors import invalid_api_key

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})


class AuthMiddleware:
    """Answer 401 unless the request has one of the keys, or its path is in `OPEN_PATHS` or `more_open`.

    The key is given as `Authorization: Bearer <key>` or as `x-api-key`.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], more_open: Iterable[str] = ()) -> None:
        self.app = app
        self._open = OPEN_PATHS.union(more_open)
        self._digests = tuple(_digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        await ErrorResponse(invalid_api_key())(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"] in self._open:
            return True
        token = _token(scope["headers"])
        if not token:  # even if an empty key is configured
            return False
        digest = _digest(token)
        # Compare all keys, so that the time does not depend on which one matches.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def key_digest(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the SHA-256 of a request's key in hexadecimal."""
    return _digest(_token(headers)).hex()


def digests(keys: Iterable[str]) -> list[str]:
    """Return the SHA-256 of each of the server's keys in hexadecimal."""
    return [_digest(key.encode()).hex() for key in keys]


def _token(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the first bearer token that is not empty, else the first `x-api-key`."""
    key = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                return token.strip()
        elif name == b"x-api-key" and not key:
            key = value.strip()
    return key


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
