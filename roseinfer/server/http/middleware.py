"""Plain ASGI middleware: request ids and HTTP metrics, a last net for our own bugs, and the inference routes."""

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
from roseinfer.server.http.errors import OPENAI, ApiError, Dialect, as_api_error, bad_request, internal_error
from roseinfer.text.tokenizer import is_panic

# --- request ids: taken from the client if usable, random otherwise -----------------------------------------------
MAX_ID_CHARS = 128
# Visible ASCII: safe in a header, in a log line and in JSON.
_VALID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")


def new_request_id() -> str:
    """Nobody else's; not a secret."""
    return f"{random.getrandbits(128):032x}"


def check_request_id(value: str, param: str) -> str:
    if not _VALID.fullmatch(value):
        raise bad_request(f"{param} must be 1 to {MAX_ID_CHARS} visible ASCII characters", param)
    return value


log = logging.getLogger(__name__)

# Nobody is left to read it; the status is for the metrics.
CLIENT_CLOSED_REQUEST = 499


class EdgeMiddleware:
    """Sets `scope["state"]["request_id"]` and echoes it, as it stands when the answer begins, in `X-Request-Id`.

    `dialects`: those of the APIs that are not OpenAI's, by the path that all their paths begin with; `scope["state"]`
    has it as "dialect".

    Who sends `endpoint-load-metrics-format` is told in `endpoint-load-metrics` what `load` makes of it, which raises
    `ApiError` for what it does not know.

    Reports (path, method, status, seconds) of every answer when it has ended; status 0 = there was none.
    `scope["state"]["status"]` is that of the answer once it has begun.
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
        state["request_id"] = new_request_id()
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
                self._load(wanted)  # refused before anything is done for it
                scope["state"]["load"] = wanted
        except ApiError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return value.decode("latin-1")
    return None


class CrashMiddleware:
    """A bug in a route, or of a library, answers 500 with our error body. Once the answer has begun, the connection is
    cut.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except BaseException as error:
            if scope["type"] != "http" or not (isinstance(error, Exception) or is_panic(error)):
                raise
            log.exception("request %s failed on a bug", scope["state"]["request_id"])
            if not scope["state"]["status"]:
                await ErrorResponse(internal_error())(scope, receive, send)


class DirectRoutes:
    """POSTs to the paths of `routes` do not pass through the framework's router, which knows the same applications.

    What it does for a request (dependencies, exit stacks, validation) these routes do not use, and it costs as much as
    their own work.
    """

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
