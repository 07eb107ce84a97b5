"""API keys: every route is guarded but a short list, decided on the path of the scope alone."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from roseinfer.server.http.body import ErrorResponse
from roseinfer.server.http.errors import invalid_api_key

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})


class AuthMiddleware:
    """Answers 401 unless the request carries one of the keys, as `Authorization: Bearer <key>` or as `x-api-key`, or is
    for one of `OPEN_PATHS` or of `more_open`.
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
        if not token:  # whatever the keys are: a request without one has none
            return False
        digest = _digest(token)
        # Every key is compared, so that the time taken does not tell which one matched.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def key_digest(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """SHA-256, in hexadecimal, of the key that a request carries."""
    return _digest(_token(headers)).hex()


def digests(keys: Iterable[str]) -> list[str]:
    """The same of the server's keys."""
    return [_digest(key.encode()).hex() for key in keys]


def _token(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The first bearer token that is not empty, else the first `x-api-key`."""
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
