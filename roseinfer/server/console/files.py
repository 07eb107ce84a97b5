"""Static files of the console. They hold no data of the server and need no API key."""

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
# The page loads from and connects to this server only, and cannot be framed.
_SECURITY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class ConsoleFiles:
    """Files found in a folder at startup. No other file is served.

    Browsers revalidate each file by its `ETag`, so that they never mix files of two versions.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        found = (path for path in sorted(folder.rglob("*")) if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in found}
        self._files: Mapping[str, Path] = {
            name: path for name, path in names.items() if not any(part.startswith(".") for part in name.split("/"))
        }

    @property
    def names(self) -> list[str]:
        """Paths relative to the folder, with slashes."""
        return list(self._files)

    def answer(self, name: str, headers: Headers) -> Response:
        """Return the file `name`, or 304 if the client has it."""
        path = self._files[name]
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        given = {**_SECURITY, "ETag": etag, "Cache-Control": "no-cache"}
        if _has(headers.get("if-none-match", ""), etag):
            return Response(status_code=304, headers=given)
        given["Content-Type"] = _TYPES.get(path.suffix, _TEXT)
        return Response(body, headers=given)


def _has(known: str, etag: str) -> bool:
    """True if the `If-None-Match` header `known` has the tag. Compressing proxies make tags weak."""
    return known.strip() == "*" or any(tag.strip().removeprefix("W/") == etag for tag in known.split(","))
