"""What the prefix indexes gain and lose, as plain events for whoever routes requests by what an engine holds.

Only full blocks are told of, and only those without a cache salt: with one, the tokens are a tenant's own affair, and
nobody who does not know the salt could find the block.
"""

from typing import NamedTuple

from roseinfer.kv.blocks import Digest, IndexEntry, IndexListener, root_key, sha256

GPU = "GPU"  # the KV cache, wherever the engine runs
CPU = "CPU"  # blocks in host memory


class BlockStored(NamedTuple):
    """A block can be matched from now on. `parent`: the key of the block before it, None for a prompt's first."""

    key: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    medium: str


class BlockRemoved(NamedTuple):
    """A block cannot be matched any more."""

    key: bytes
    medium: str


KvEvent = BlockStored | BlockRemoved


class KvEvents:
    """Collects the events of all indexes, in order; whoever publishes them takes them away after each step."""

    def __init__(self, digest: Digest = sha256) -> None:
        self._root = root_key("", digest)
        self._events: list[KvEvent] = []

    def of(self, medium: str) -> IndexListener:
        """What listens to the index of this medium."""
        return _Listener(medium, self._root, self._events)

    def take(self) -> list[KvEvent]:
        """The events since the last call."""
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

    def forgotten(self, entry: IndexEntry) -> None:
        if not entry.salted:
            self._events.append(BlockRemoved(entry.key, self._medium))
