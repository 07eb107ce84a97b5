"""The console's files. They hold nothing of this server, so they are served without a key."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

import roseinfer

FOLDER = Path(roseinfer.__file__).parent / "assets" / "console"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}
_TEXT = "text/plain; charset=utf-8"
# Nothing runs, is shown or is called but what this server has; and nobody shows the page within another.
_SECURITY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class ConsoleFiles:
    """What is in a folder when this is made; nothing else can be asked for.

    A file is read when it is asked for, and a browser that has it as it is (`ETag`) is told so: it asks each time, so
    that nobody has the page of one version and the script of another.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        found = (path for path in sorted(folder.rglob("*")) if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in found}
        self._files: Mapping[str, Path] = {
            name: path for name, path in names.items() if not any(part.startswith(".") for part in name.split("/"))
        }

    @property
    def names(self) -> list[str]:
        """Relative to the folder, with slashes."""
        return list(self._files)

    def answer(self, name: str, headers: Headers) -> Response:
        """One of `names`, or 304 if whoever sends these `headers` has it."""
        path = self._files[name]
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        given = {**_SECURITY, "ETag": etag, "Cache-Control": "no-cache"}
        if _has(headers.get("if-none-match", ""), etag):
            return Response(status_code=304, headers=given)
        given["Content-Type"] = _TYPES.get(path.suffix, _TEXT)
        return Response(body, headers=given)


def _has(known: str, etag: str) -> bool:
    """`known`: an If-None-Match. Proxies that compress make a tag weak."""
    return known.strip() == "*" or any(tag.strip().removeprefix("W/") == etag for tag in known.split(","))
