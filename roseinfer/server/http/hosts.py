"""Names and web pages that may use a server without a key.

Without a key, what keeps a web page from using a server on its reader's machine is the browser: it names the page's
origin in `Origin`, and in `Host` the name that the page was made to reach the server by (DNS rebinding).
"""

import ipaddress
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from roseinfer.server.http.auth import OPEN_PATHS
from roseinfer.server.http.body import ErrorResponse
from roseinfer.server.http.errors import ApiError, host_not_allowed, origin_not_allowed

ANY = "*"
# Values of `Host` that were found to be allowed, so that each is looked at once.
MAX_KNOWN_HOSTS_COUNT = 256


class HostMiddleware:
    """Answer 403 unless `Host` is localhost, an IP address or one of `hosts`, and `Origin` the server's own or one of
    `origins`. `OPEN_PATHS` are for everybody.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self.app = app
        names = [name.lower() for name in hosts]
        self._any_host = ANY in names
        self._names = frozenset({"localhost", *names})
        self._domains = tuple(name[1:] for name in names if name.startswith("*."))
        self._any_origin = ANY in origins
        self._origins = frozenset(origin.lower().encode() for origin in origins)
        self._known: set[bytes] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            refusal = self._refusal(scope["headers"])
            if refusal is not None:
                await ErrorResponse(refusal)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        host = origin = None
        for name, value in headers:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value if origin is None else b"several"
        if host is not None and host not in self._known and not self._allows(host):
            return host_not_allowed(host.decode("latin-1"))
        if origin is not None and not self._is_allowed_origin(origin, host):
            return origin_not_allowed(origin.decode("latin-1"))
        return None

    def _allows(self, host: bytes) -> bool:
        name = _without_port(host.decode("latin-1").lower())
        allowed = self._any_host or name in self._names or name.endswith(self._domains) or _is_address(name)
        if allowed and len(self._known) < MAX_KNOWN_HOSTS_COUNT:
            self._known.add(host)
        return allowed

    def _is_allowed_origin(self, origin: bytes, host: bytes | None) -> bool:
        """The server's own may be https: a proxy in front of it may speak TLS."""
        origin = origin.lower()
        if self._any_origin or origin in self._origins:
            return True
        return host is not None and origin in (b"http://" + host.lower(), b"https://" + host.lower())


def _without_port(host: str) -> str:
    """Return the name or address in a value of `Host`, an IPv6 address with its brackets."""
    name, colon, port = host.rpartition(":")
    return name if colon and (not port or port.isdigit()) and (":" not in name or name.endswith("]")) else host


def _is_address(name: str) -> bool:
    try:
        if name.startswith("[") and name.endswith("]"):
            ipaddress.IPv6Address(name[1:-1])
        else:
            ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True
