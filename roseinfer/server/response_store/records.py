"""What is stored of a response, within which bounds, and the interface of a store."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from roseinfer.core.server_config import ServerConfig

# Statuses of a response that some process still works on.
RUNNING = frozenset({"queued", "in_progress"})
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`owner`: digest of the API key of its request, "" if the server has no keys. `response`: the object that clients
    get. `items`: the whole input of the model, with that of earlier responses, as clients wrote it; as JSON if it comes
    from the file. `process`: token of the process that runs it, "" once it has ended. `size`: bytes, roughly.
    """

    owner: str
    id: str
    response: dict[str, Any]
    items: list[dict[str, Any]] | bytes
    process: str = ""
    size: int = field(default=0, compare=False)

    def input(self) -> list[dict[str, Any]]:
        """`items`, which may be much to read."""
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
    """If one is exceeded, responses are removed: of the owner that has most, those that were written first."""

    max_count: int
    max_bytes: int
    max_age_s: float

    @classmethod
    def of(cls, config: ServerConfig) -> "StoreBounds":
        days = config.response_store_max_days
        return cls(config.response_store_max_count, config.response_store_max_bytes, days * _DAY_S)


class Totals(NamedTuple):
    """All that is stored now. `size`: bytes of texts; the file is larger."""

    responses: int
    size: int


class StoreObserver(Protocol):
    """Counts what becomes of responses. `not_stored` is called in any thread, the others in that which writes."""

    def stored(self, count: int) -> None: ...

    def not_stored(self, reason: str) -> None: ...

    def removed(self, reason: str, count: int) -> None: ...


class Store(Protocol):
    """`put` and `pending` may be called in any thread, the others in the event loop's."""

    @property
    def process(self) -> str:
        """Token of this process. Responses that it runs are known to have failed once it has ended."""
        ...

    def put(self, record: StoredResponse) -> None:
        """Store, or replace what has the same key, some time later.

        Never raises: what cannot be stored is counted and logged.
        """
        ...

    def pending(self, key: Key) -> StoredResponse | None:
        """A response that was `put` and is not in the file yet."""
        ...

    async def get(self, key: Key) -> StoredResponse | None:
        """Raises `StoreFailedError`."""
        ...

    async def written(self) -> None:
        """Return once all that was `put` before is in the file, or has failed."""
        ...

    def delete_later(self, key: Key) -> None:
        """Delete after all that was `put` before."""
        ...

    async def delete(self, key: Key) -> bool:
        """Return whether there was one. Raises `StoreFailedError`."""
        ...

    async def totals(self) -> Totals:
        """Raises `StoreFailedError`."""
        ...

    def close(self) -> None:
        """Write what is pending. Blocks: not for the event loop."""
        ...


class StoreFailedError(Exception):
    """The file cannot be read or written: locked, damaged, or its disk is full."""
