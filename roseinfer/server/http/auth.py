"""API keys: every path needs one, except those of a short list."""

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from roseinfer.server.http.api_keys import digest, key_of
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
        self._digests = tuple(digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        await ErrorResponse(invalid_api_key())(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"] in self._open:
            return True
        key = key_of(scope["headers"])
        if not key:  # even if an empty key is configured
            return False
        found = digest(key)
        # Compare all keys, so that the time does not depend on which one matches.
        return sum(hmac.compare_digest(found, known) for known in self._digests) > 0
