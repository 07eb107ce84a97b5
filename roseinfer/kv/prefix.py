"""The prefix index: finds the blocks that already hold the K/V of a token prefix.

A block's key is a digest chained over its prefix, `sha256(parent key + tokens)`; the root covers the cache salt. The
digest is only a hint: the parent key and the tokens themselves are compared before a block is shared.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Entry(NamedTuple):
    """What a cached block holds: `tokens` that follow the prefix whose key is `parent`."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks that hold the first `tokens` tokens. `partial`: the last of them is filled in part only."""

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    partial: bool = False


class Chain:
    """The keys of one sequence's full blocks, computed once each as its tokens become known."""

    __slots__ = ("_block_size", "_digest", "keys", "root")

    def __init__(self, root: bytes, block_size: int, digest: Digest) -> None:
        self.root = root
        self.keys: list[bytes] = []
        self._block_size = block_size
        self._digest = digest

    def entry(self, tokens: Sequence[int], index: int) -> Entry:
        """The entry of block `index`; `tokens` are the sequence's and reach to the block's end, or stop within it."""
        keys = self.keys
        while len(keys) < index:
            keys.append(self._key(self._parent(len(keys)), self._held(tokens, len(keys))))
        parent = self._parent(index)
        held = self._held(tokens, index)
        full = len(held) == self._block_size
        if full and index < len(keys):
            return Entry(keys[index], parent, held)
        key = self._key(parent, held)
        if full:
            keys.append(key)
        return Entry(key, parent, held)

    def _parent(self, index: int) -> bytes:
        return self.keys[index - 1] if index else self.root

    def _held(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self._block_size : (index + 1) * self._block_size])

    def _key(self, parent: bytes, held: tuple[int, ...]) -> bytes:
        return self._digest(parent + array("I", held).tobytes())


class PrefixIndex:
    """Which cached block holds which entry. A block holds at most one full entry and one partial one.

    A partial entry covers the first slots of a block only, so it stays true while its owner appends behind them.
    """

    def __init__(self, num_blocks: int, block_size: int, digest: Digest = sha256) -> None:
        self._block_size = block_size
        self._digest = digest
        self._blocks: dict[bytes, int] = {}
        self._full: list[Entry | None] = [None] * num_blocks
        self._partial: list[Entry | None] = [None] * num_blocks

    def chain(self, salt: str) -> Chain:
        return Chain(self._digest(b"roseinfer" + salt.encode("utf-8", "surrogatepass")), self._block_size, self._digest)

    def holds(self, block: int) -> bool:
        """Whether the block may still be matched."""
        return self._full[block] is not None or self._partial[block] is not None

    def match(self, chain: Chain, tokens: Sequence[int]) -> PrefixHit:
        """The longest cached prefix of `tokens`: full blocks, and a partly filled last one if it fits exactly."""
        size = self._block_size
        blocks: list[int] = []
        full_blocks = len(tokens) // size
        for index in range(full_blocks):
            block = self._find(chain.entry(tokens, index), self._full)
            if block is None:
                return PrefixHit(index * size, tuple(blocks))
            blocks.append(block)
        if len(tokens) % size:
            block = self._find(chain.entry(tokens, full_blocks), self._partial)
            if block is not None:
                return PrefixHit(len(tokens), (*blocks, block), partial=True)
        return PrefixHit(full_blocks * size, tuple(blocks))

    def _find(self, entry: Entry, held: list[Entry | None]) -> int | None:
        block = self._blocks.get(entry.key)
        if block is None or held[block] != entry:
            return None
        return block

    def insert(self, block: int, entry: Entry) -> None:
        """Remember that `block` holds `entry`; the first block with an entry keeps it."""
        held = self._full if len(entry.tokens) == self._block_size else self._partial
        if held[block] is None and entry.key not in self._blocks:
            held[block] = entry
            self._blocks[entry.key] = block

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        self.forget_beyond(block, 0)

    def forget_beyond(self, block: int, tokens: int) -> None:
        """The block's slots from `tokens` on are about to be overwritten."""
        for held in (self._full, self._partial):
            entry = held[block]
            if entry is not None and len(entry.tokens) > tokens:
                del self._blocks[entry.key]
                held[block] = None

    def check_integrity(self) -> None:
        """Every key points to the block that holds it, and to no other."""
        held = {e.key: b for side in (self._full, self._partial) for b, e in enumerate(side) if e is not None}
        assert held == self._blocks, "the index and the blocks' entries disagree"
        assert all(len(e.tokens) == self._block_size for e in self._full if e)
        assert all(0 < len(e.tokens) < self._block_size for e in self._partial if e)
