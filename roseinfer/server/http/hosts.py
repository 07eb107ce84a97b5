"""Allowed hosts and origins of a server without API keys.

Without a key, a web page could use a server on the visitor's machine. Browsers name the page's origin in `Origin`, and
in `Host` the name under which the page reaches the server (DNS rebinding), so both are checked.
"""

import ipaddress
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from roseinfer.server.http.api_keys import Headers
from roseinfer.server.http.auth import OPEN_PATHS
from roseinfer.server.http.body import ErrorResponse
from roseinfer.server.http.errors import ApiError, host_not_allowed, origin_not_allowed

ANY = "*"
# Cached values of `Host` that are allowed.
MAX_KNOWN_HOSTS_COUNT = 256


class HostMiddleware:
    """Answer 403 unless `Host` and `Origin` are allowed or the path is in `OPEN_PATHS`.

    `Host` must be localhost, an IP address or one of `hosts`; `Origin` must be the server's own or one of `origins`.
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
            rejection = self._rejection(scope["headers"])
            if rejection is not None:
                await ErrorResponse(rejection)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _rejection(self, headers: Headers) -> ApiError | None:
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
        """Return True if the origin is allowed. The server's own may be https, since a proxy may terminate TLS."""
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
