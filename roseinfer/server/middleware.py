"""Plain ASGI middleware: request ids, HTTP metrics, and a last net for our own bugs."""

import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roseinfer.server.errors import ApiError, internal_error
from roseinfer.server.ids import check_request_id, new_request_id
from roseinfer.server.responses import ErrorResponse

log = logging.getLogger(__name__)


class RequestIdMiddleware:
    """Sets `scope["state"]["request_id"]` and echoes it, as it stands when the answer begins, in `X-Request-Id`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = new_request_id()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        try:
            given = _header(scope, b"x-request-id")
            if given is not None:
                state["request_id"] = check_request_id(given, "X-Request-Id")
                state["request_id_given"] = True
        except ApiError as error:
            await ErrorResponse(error)(scope, receive, send_with_id)
            return
        await self.app(scope, receive, send_with_id)


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return value.decode("latin-1")
    return None


class HttpMetricsMiddleware:
    """Reports (path, method, status, seconds) of every answer when it has ended; status 0 = there was none."""

    def __init__(self, app: ASGIApp, observe: Callable[[str, str, int, float], None]) -> None:
        self.app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_s = time.monotonic()
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            self._observe(scope["path"], scope["method"], status, time.monotonic() - started_s)


class CrashMiddleware:
    """A bug in a route answers 500 with our error body; once the answer has begun, the connection is cut."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            if scope["type"] != "http":
                raise
            log.exception("request %s failed on a bug", scope["state"]["request_id"])
            if not started:
                await ErrorResponse(internal_error())(scope, receive, send)
