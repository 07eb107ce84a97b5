"""ASGI middleware: request ids and HTTP metrics, errors for bugs, and the inference routes."""

import logging
import random
import re
import time
from collections.abc import Callable, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roseinfer.core.errors import RoseinferError
from roseinfer.server.http.body import ErrorResponse
from roseinfer.server.http.errors import (
    CLIENT_CLOSED_REQUEST,
    OPENAI,
    Dialect,
    as_api_error,
    bad_request,
    internal_error,
)
from roseinfer.text.tokenizer import is_panic

# --- request ids: taken from the client if usable, random otherwise -----------------------------------------------
MAX_ID_CHARS = 128
# Visible ASCII: safe in a header, in a log line and in JSON.
_VALID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")


def check_request_id(value: str, param: str) -> str:
    if not _VALID.fullmatch(value):
        raise bad_request(f"{param} must be 1 to {MAX_ID_CHARS} visible ASCII characters", param)
    return value


log = logging.getLogger(__name__)


class EdgeMiddleware:
    """Outermost middleware: request ids, API dialects, the load header and HTTP metrics.

    Set `scope["state"]["request_id"]`, and send its value at the start of the answer in `X-Request-Id`.

    `dialects`: of the APIs other than OpenAI's, by path prefix; stored as `scope["state"]["dialect"]`.

    `load`: returns the value of the header `endpoint-load-metrics` for a request's `endpoint-load-metrics-format`, and
    raises `InvalidRequestError` for an unknown format.

    `observe` receives (path, method, status, seconds) of every answer after its end; status 0 = no answer.
    `scope["state"]["status"]` has the status of a started answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        observe: Callable[[str, str, int, float], None],
        dialects: Mapping[str, Dialect],
        load: Callable[[str], str],
    ) -> None:
        self.app = app
        self._observe = observe
        self._load = load
        self._dialects = [(f"{prefix}/", dialect) for prefix, dialect in dialects.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_s = time.monotonic()
        state = scope.setdefault("state", {})
        state["request_id"] = f"{random.getrandbits(128):032x}"  # unique, not a secret
        state["status"] = 0
        state["dialect"] = dialect = self._dialect(scope["path"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                value = state["request_id"].encode()
                more = [(name, value) for name in dialect.id_headers]
                if "load" in state:
                    more.append((b"endpoint-load-metrics", self._load(state["load"]).encode()))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id)
        finally:
            self._observe(scope["path"], scope["method"], state["status"], time.monotonic() - started_s)

    def _dialect(self, path: str) -> Dialect:
        for prefix, dialect in self._dialects:
            if f"{path}/".startswith(prefix):
                return dialect
        return OPENAI

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            given = _header(scope, b"x-request-id")
            if given is not None:
                scope["state"]["request_id"] = check_request_id(given, "X-Request-Id")
                scope["state"]["request_id_given"] = True
            wanted = _header(scope, b"endpoint-load-metrics-format")
            if wanted is not None:
                self._load(wanted)  # reject an unknown format before any work
                scope["state"]["load"] = wanted
        except RoseinferError as error:
            await ErrorResponse(as_api_error(error))(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return value.decode("latin-1")
    return None


class CrashMiddleware:
    """Answer 500 with our error body after an unexpected exception. Once the answer has started, only log it: the
    server then closes the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except BaseException as error:
            if scope["type"] != "http" or not (isinstance(error, Exception) or is_panic(error)):
                raise
            log.exception("request %s failed with an unexpected error", scope["state"]["request_id"])
            if not scope["state"]["status"]:
                await ErrorResponse(internal_error())(scope, receive, send)


class InferenceRoutes:
    """Serve POSTs to the paths of `routes` without FastAPI, whose work per request costs as much as their own."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, ASGIApp]) -> None:
        self.app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if direct is None:
            await self.app(scope, receive, send)
            return
        try:
            await direct(scope, receive, send)
        except RoseinferError as error:
            await ErrorResponse(as_api_error(error))(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
