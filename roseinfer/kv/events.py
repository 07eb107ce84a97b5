"""Events of blocks that become matchable or stop being so, for routers that follow an engine's cache.

Only full blocks without a cache salt are reported. Salted tokens belong to one tenant, and nobody without the salt
could find the block.
"""

from typing import NamedTuple

from roseinfer.kv.blocks import IndexEntry, IndexListener, root_key

GPU = "GPU"  # the KV cache, on any device
CPU = "CPU"  # blocks in host memory


class BlockStored(NamedTuple):
    """A block became matchable. `parent`: key of the block before it, None for the first block of a prompt."""

    key: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    medium: str


class BlockRemoved(NamedTuple):
    """A block is no longer matchable."""

    key: bytes
    medium: str


KvEvent = BlockStored | BlockRemoved


class KvEvents:
    """Ordered events of all indexes. The publisher takes them after each step."""

    def __init__(self) -> None:
        self._root = root_key("")
        self._events: list[KvEvent] = []

    def of(self, medium: str) -> IndexListener:
        """Return a listener for the index of this medium."""
        return _Listener(medium, self._root, self._events)

    def take(self) -> list[KvEvent]:
        """Return the events since the last call."""
        taken = self._events.copy()
        self._events.clear()
        return taken


class _Listener:
    def __init__(self, medium: str, root: bytes, events: list[KvEvent]) -> None:
        self._medium, self._root, self._events = medium, root, events

    def inserted(self, entry: IndexEntry) -> None:
        if not entry.salted:
            parent = None if entry.parent == self._root else entry.parent
            self._events.append(BlockStored(entry.key, parent, entry.tokens, self._medium))

    def removed(self, entry: IndexEntry) -> None:
        if not entry.salted:
            self._events.append(BlockRemoved(entry.key, self._medium))
