"""Path prefix under which a reverse proxy shows the server (`--root-path`)."""

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Remove the prefix from paths that have it: some proxies remove it themselves, others pass it on.

    The prefix alone is redirected to `PREFIX/`, since the links of the console are relative to it.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self._root_path = root_path
        self._prefix = f"{root_path}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"] == self._root_path:
                await RedirectResponse(self._prefix)(scope, receive, send)
                return
            path = scope["path"]
            shown = path[len(self._root_path) :] if path.startswith(self._prefix) else path
            scope = {**scope, "path": shown, "root_path": self._root_path}  # FastAPI writes links with the latter
        await self.app(scope, receive, send)
