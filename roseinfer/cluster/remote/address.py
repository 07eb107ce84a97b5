"""Addresses of engines on other hosts."""

from typing import NamedTuple

from roseinfer.core.errors import ConfigError

MAX_PORT = 2**16 - 1


class HostPort(NamedTuple):
    """`host`: a name or an IP address, IPv6 without brackets. `port`: 0 = any free port, to listen on."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, option: str) -> "HostPort":
        """Read `10.0.0.2:7000`, `node:7000` or `[fd00::2]:7000`. Raise `ConfigError`, which names `option`."""
        host, colon, port = text.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        named = host[1:-1] if bracketed else host
        if not colon or not named or not (port.isascii() and port.isdecimal()) or int(port) > MAX_PORT:
            raise ConfigError(f"{option}: invalid address {text!r} (expected HOST:PORT)")
        if ":" in named and not bracketed:
            raise ConfigError(f"{option}: invalid address {text!r} (put an IPv6 address in brackets, as [::1]:7000)")
        return cls(named, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
