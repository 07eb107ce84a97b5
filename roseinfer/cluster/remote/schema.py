"""Hash of all message types that travel between hosts: equal hashes mean compatible versions of roseinfer."""

from collections.abc import Iterator
from enum import Enum
from functools import cache
from hashlib import sha256
from typing import Any

from msgspec import inspect

from roseinfer.cluster.remote.messages import StatusMessage
from roseinfer.engine.messages import ClientMessage, EngineMessage

SCHEMA_BYTES = 8


@cache
def schema() -> bytes:
    """`SCHEMA_BYTES` bytes."""
    return digest(ClientMessage, EngineMessage, StatusMessage)


def digest(*kinds: Any) -> bytes:
    """Hash the names, order and types of the fields of these types, and of the types within them."""
    seen: set[Any] = set()
    words = [word for kind in kinds for word in _described(inspect.type_info(kind), seen)]
    return sha256("\n".join(words).encode()).digest()[:SCHEMA_BYTES]


def _described(kind: Any, seen: set[Any]) -> Iterator[str]:
    yield type(kind).__name__
    cls = getattr(kind, "cls", None)
    if cls is not None:
        yield cls.__name__
        if cls in seen:
            return
        seen.add(cls)
        if issubclass(cls, Enum):
            yield from (repr(member.value) for member in cls)
    if isinstance(kind, inspect.StructType):
        yield f"{kind.tag!r} {kind.array_like}"
    for field in getattr(kind, "fields", ()):
        yield field.name
        yield from _described(field.type, seen)
    for part in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
        yield from _described(part, seen)
    for name in ("item_type", "key_type", "value_type"):
        if hasattr(kind, name):
            yield from _described(getattr(kind, name), seen)
