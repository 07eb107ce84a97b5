"""Stored responses, and the bounds, totals and errors of a store."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from roseinfer.core.config.server import ServerConfig

# Statuses of a response that some process still works on.
RUNNING = frozenset({"queued", "in_progress"})
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Response with its input. `owner`: digest of the API key of its request, "" without keys.
    `response`: object that clients get. `items`: whole input of the model, with that of earlier responses, as clients
    wrote it; JSON if it comes from the file. `process`: token of the process that runs it, "" once it has ended.
    `size`: approximate number of bytes.
    """

    owner: str
    id: str
    response: dict[str, Any]
    items: list[dict[str, Any]] | bytes
    process: str = ""
    size: int = field(default=0, compare=False)

    def input(self) -> list[dict[str, Any]]:
        """Return `items`, decoded if they are JSON."""
        items: list[dict[str, Any]] = orjson.loads(self.items) if isinstance(self.items, bytes) else self.items
        return items

    @property
    def key(self) -> "Key":
        return Key(self.owner, self.id)

    @property
    def running(self) -> bool:
        return self.response["status"] in RUNNING


class Key(NamedTuple):
    """Name of a stored response: ids of different owners may be the same."""

    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """Bounds of a store. Beyond one, the owner that has most loses the responses that were written first."""

    max_count: int
    max_bytes: int
    max_age_s: float

    @classmethod
    def of(cls, config: ServerConfig) -> "StoreBounds":
        days = config.response_store_max_days
        return cls(config.response_store_max_count, config.response_store_max_bytes, days * _DAY_S)


class Totals(NamedTuple):
    """Number of stored responses, and their bytes as JSON. The file is larger."""

    responses: int
    size: int


class StoreObserver(Protocol):
    """Counter of stored and removed responses. `not_stored` is called in any thread, the others in the writer's."""

    def stored(self, count: int) -> None: ...

    def not_stored(self, reason: str) -> None: ...

    def removed(self, reason: str, count: int) -> None: ...


class StoreFailedError(Exception):
    """Failure to read or write the file: it is locked or damaged, or its disk is full."""
