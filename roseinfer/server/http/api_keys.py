"""The API key in a request's headers, and digests of keys."""

import hashlib
from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]


def key_digest(headers: Headers) -> str:
    """Return the SHA-256 of a request's key in hexadecimal."""
    return digest(key_of(headers)).hex()


def digests(keys: Iterable[str]) -> list[str]:
    """Return the SHA-256 of each of the server's keys in hexadecimal."""
    return [digest(key.encode()).hex() for key in keys]


def key_of(headers: Headers) -> bytes:
    """Return the first bearer token that is not empty, else the first `x-api-key`."""
    key = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                return token.strip()
        elif name == b"x-api-key" and not key:
            key = value.strip()
    return key


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
