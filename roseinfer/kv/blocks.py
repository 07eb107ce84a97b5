"""Pool of KV blocks with a least-recently-used free list, and the index that finds prefixes in them."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class BlockPool:
    """Blocks 0 .. num_blocks - 1. A block is free while it has no references.

    Free blocks form a doubly linked list threaded through two arrays, so a block in the middle can be taken in O(1)
    when the prefix cache matches it. Blocks are reused from the head. A freed block goes to the tail if its content may
    be wanted again, to the head otherwise. `on_reuse(block)` is called before a new owner overwrites a block.

    Blocks from `spare_from` on that were never used are taken only when no other block is free.

    `release_early` frees blocks whose content may be wanted again, but is the first to go.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None], spare_from: int | None = None) -> None:
        if num_blocks <= 0:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.num_free = num_blocks
        self.num_taken = 0  # so far
        self._on_reuse = on_reuse
        # The list is a ring closed by a sentinel with index num_blocks.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        # The first unused spare block, which follows the tail of the used blocks; the sentinel if none is left.
        self._spare = num_blocks if spare_from is None else min(spare_from, num_blocks)
        self._last = self._spare  # the first of the blocks that are reused last; `_spare` if there are none

    def take(self, count: int) -> tuple[int, ...]:
        """Return `count` blocks with one reference each. The caller has checked `num_free`."""
        assert count <= self.num_free, "the caller checks num_free"
        sentinel, following, refs = self.num_blocks, self._next, self.refs
        taken = []
        block = following[sentinel]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            block = following[block]
        following[sentinel] = block
        self._prev[block] = sentinel
        self.num_free -= count
        self.num_taken += count
        if self._last < sentinel and refs[self._last]:
            self._last = block  # all blocks before it were taken as well
        if self._spare < sentinel and refs[self._spare]:
            self._spare = block
        for block in taken:
            self._on_reuse(block)
        return tuple(taken)

    def share(self, block: int) -> None:
        """Add a reference; a free block stops being free."""
        if self.refs[block] == 0:
            before, after = self._prev[block], self._next[block]
            self._next[before] = after
            self._prev[after] = before
            if block == self._last:
                self._last = after
            self.num_free -= 1
        self.refs[block] += 1

    def release(self, blocks: Iterable[int], reuse_last: Callable[[int], bool]) -> None:
        """Drop one reference of each block; blocks without references become free, in the order given.

        Blocks for which `reuse_last(block)` is true are reused last, in that order.
        """
        for block in self._unreferenced(blocks):
            if not reuse_last(block):
                self._insert_after(self.num_blocks, block)
                continue
            if self._last == self._spare:
                self._last = block
            self._insert_after(self._prev[self._spare], block)

    def release_early(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; blocks without references become free, in the order given. They are reused
        after free blocks without content, and before those that `release` puts last.
        """
        for block in self._unreferenced(blocks):
            self._insert_after(self._prev[self._last], block)

    def _unreferenced(self, blocks: Iterable[int]) -> Iterator[int]:
        """Drop one reference of each block, and yield those that have none left."""
        for block in blocks:
            self.refs[block] -= 1
            assert self.refs[block] >= 0, f"block {block} released more often than it was taken"
            if self.refs[block] == 0:
                yield block

    def _insert_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before], self._prev[after] = block, block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1

    def next_free(self, count: int) -> list[int]:
        """Return up to `count` free blocks in the order in which they will be taken."""
        found: list[int] = []
        block = self._next[self.num_blocks]
        while len(found) < count and block != self.num_blocks:
            found.append(block)
            block = self._next[block]
        return found

    def walk_free(self) -> Iterator[int]:
        """Yield the free list in order of reuse, for checks and tests. The pool must not change meanwhile."""
        block = self._next[self.num_blocks]
        for _ in range(self.num_blocks + 1):
            if block == self.num_blocks:
                return
            yield block
            block = self._next[block]
        raise AssertionError("the free list has a cycle")


# --- the prefix index: finds the blocks that already hold the K/V of a token prefix ---------------------------------
def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class IndexEntry(NamedTuple):
    """Content of a cached block: `tokens` that follow the prefix whose key is `parent`.

    `salted`: only requests with the same cache salt find it.
    """

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    salted: bool = False


class IndexListener(Protocol):
    """Callbacks for full entries that an index gains and loses."""

    def inserted(self, entry: IndexEntry) -> None: ...

    def removed(self, entry: IndexEntry) -> None: ...


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks that hold the first `tokens` tokens. `partial`: the last block is only partly filled."""

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Lookup:
    """Result of a walk of the index for the first `known` tokens of a sequence, and the state to reuse it.

    `first`: block at which the walk began. `last`: entry of the hit's last block. `next_key`: key at which the walk
    ended, None if everything was found. `holes`: the index's count at that time.
    """

    known: int
    first: int
    hit: PrefixHit
    last: IndexEntry | None
    next_key: bytes | None
    holes: int


KEY_BYTES = 32


def root_key(salt: str) -> bytes:
    """Return the key to which the keys of all prefixes with this salt are chained."""
    return sha256(b"roseinfer" + salt.encode("utf-8", "surrogatepass"))


def block_keys(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Return the keys of a prompt's full blocks, `KEY_BYTES` each, as an engine's cache will compute them."""
    keys, parent = [], root_key(salt)
    words = array("I", tokens).tobytes()
    step = block_size * array("I").itemsize
    for end in range(step, len(words) + 1, step):
        parent = sha256(parent + words[end - step : end])
        keys.append(parent)
    return keys


class Chain:
    """Keys of one sequence's full blocks, each computed once when its tokens are known."""

    __slots__ = ("_block_size", "keys", "root", "salted")

    def __init__(self, root: bytes, block_size: int, salted: bool = False) -> None:
        self.root = root
        self.salted = salted
        self.keys: list[bytes] = []
        self._block_size = block_size

    def share(self, other: "Chain", blocks: int) -> None:
        """Copy the keys of the first `blocks` full blocks of a sequence that begins with the same tokens."""
        if len(self.keys) < blocks:
            self.keys = other.keys[:blocks]

    def entry(self, tokens: Sequence[int], index: int) -> IndexEntry:
        """Return the entry of block `index`. `tokens`: the sequence's tokens, up to the block's end or within it."""
        keys = self.keys
        while len(keys) < index:
            keys.append(self._key(self._parent(len(keys)), self._tokens_of(tokens, len(keys))))
        parent = self._parent(index)
        held = self._tokens_of(tokens, index)
        full = len(held) == self._block_size
        if full and index < len(keys):
            return IndexEntry(keys[index], parent, held, self.salted)
        key = self._key(parent, held)
        if full:
            keys.append(key)
        return IndexEntry(key, parent, held, self.salted)

    def _parent(self, index: int) -> bytes:
        return self.keys[index - 1] if index else self.root

    def _tokens_of(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self._block_size : (index + 1) * self._block_size])

    def _key(self, parent: bytes, held: tuple[int, ...]) -> bytes:
        return sha256(parent + array("I", held).tobytes())


class PrefixIndex:
    """Map from entries to the cached blocks that hold them. A block holds at most one full and one partial entry.

    A partial entry covers only the first slots of a block, so it stays true while its owner appends to the block.
    """

    def __init__(self, num_blocks: int, block_size: int, listener: IndexListener | None = None) -> None:
        self._block_size = block_size
        self._listener = listener
        self._blocks: dict[bytes, int] = {}
        self._following: dict[bytes, int] = {}  # how many entries have this key as their parent
        # Number of entries removed while others followed them. A chain's tail is normally removed first. But two
        # sequences may compute the same block concurrently; then later blocks may outlive the indexed copy.
        self._holes = 0
        self.changes = 0  # entries inserted or removed so far
        self._full: list[IndexEntry | None] = [None] * num_blocks
        self._partial: list[IndexEntry | None] = [None] * num_blocks

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._blocks)

    def chain(self, salt: str) -> Chain:
        return Chain(root_key(salt), self._block_size, salted=bool(salt))

    def holds(self, block: int) -> bool:
        """True if the block can be matched."""
        return self._full[block] is not None or self._partial[block] is not None

    def full_entry(self, block: int) -> IndexEntry | None:
        """Return the block's entry if it is a full one."""
        return self._full[block]

    def block_of(self, key: bytes) -> int | None:
        """Return the block that holds the entry with this key, or None."""
        return self._blocks.get(key)

    def has_followers(self, key: bytes) -> bool:
        """True if an entry follows the prefix with this key."""
        return key in self._following

    def match(self, chain: Chain, tokens: Sequence[int]) -> PrefixHit:
        """Return the longest cached prefix of `tokens`: full blocks, and a partly filled last one if
        it fits exactly.
        """
        return self.look_up(chain, tokens).hit

    def look_up(self, chain: Chain, tokens: Sequence[int], before: Lookup | None = None, first: int = 0) -> Lookup:
        """Return `match` with the state that makes the next look-up of this sequence a comparison.

        `before`: the sequence's previous look-up. The hit's blocks start at block `first` of the sequence; its tokens
        count from the sequence's start.
        """
        if before is not None and before.known == len(tokens) and before.first == first and self._still_valid(before):
            return before
        size, known = self._block_size, len(tokens)
        blocks: list[int] = []
        last: IndexEntry | None = None
        for index in range(first, -(-known // size)):
            entry = chain.entry(tokens, index)
            partial = len(entry.tokens) < size
            block = self.find(entry)
            if block is None:
                hit = PrefixHit(index * size, tuple(blocks))
                return Lookup(known, first, hit, last, entry.key, self._holes)
            blocks.append(block)
            # The index's own object: its identity shows later whether it is still there.
            last = (self._partial if partial else self._full)[block]
        hit = PrefixHit(known, tuple(blocks), partial=known % size != 0)
        return Lookup(known, first, hit, last, None, self._holes)

    def _still_valid(self, lookup: Lookup) -> bool:
        """True if a new walk would find the same.

        Without new holes the last block implies all blocks before it: they cannot have been removed while it stayed.
        """
        if lookup.holes != self._holes or lookup.next_key in self._blocks:
            return False
        if lookup.last is None:
            return True
        held = self._partial if lookup.hit.partial else self._full
        return held[lookup.hit.blocks[-1]] is lookup.last

    def find(self, entry: IndexEntry) -> int | None:
        """Return the block that holds this entry, or None."""
        held = self._full if len(entry.tokens) == self._block_size else self._partial
        block = self._blocks.get(entry.key)
        if block is None or held[block] != entry:
            return None
        return block

    def insert(self, block: int, entry: IndexEntry) -> None:
        """Record that `block` holds `entry`; a block that already holds the same entry keeps it."""
        held = self._full if len(entry.tokens) == self._block_size else self._partial
        if held[block] is None and entry.key not in self._blocks:
            held[block] = entry
            self.changes += 1
            self._blocks[entry.key] = block
            self._following[entry.parent] = self._following.get(entry.parent, 0) + 1
            if self._listener is not None and held is self._full:
                self._listener.inserted(entry)

    def remove(self, block: int) -> None:
        """Remove the block's entries, because it is about to be overwritten."""
        self.remove_beyond(block, 0)

    def remove_beyond(self, block: int, tokens: int) -> None:
        """Remove the block's entries that reach beyond slot `tokens`, because those slots are about
        to be overwritten.
        """
        for held in (self._full, self._partial):
            entry = held[block]
            if entry is not None and len(entry.tokens) > tokens:
                del self._blocks[entry.key]
                self.changes += 1
                held[block] = None
                self._holes += entry.key in self._following
                following = self._following[entry.parent] - 1
                if following:
                    self._following[entry.parent] = following
                else:
                    del self._following[entry.parent]
                if self._listener is not None and held is self._full:
                    self._listener.removed(entry)

    def audit(self, piece: int) -> Iterator[None]:
        """Check that every key points to exactly the block that holds it; pause every `piece` blocks.

        Raise AssertionError if not. The index must not change meanwhile.
        """
        entries = 0
        following: dict[bytes, int] = {}
        for block, (full, partial) in enumerate(zip(self._full, self._partial, strict=True)):
            if block % piece == piece - 1:
                yield
            for entry in (full, partial):
                if entry is None:
                    continue
                assert self._blocks.get(entry.key) == block, "the index and the blocks' entries disagree"
                entries += 1
                following[entry.parent] = following.get(entry.parent, 0) + 1
            assert full is None or len(full.tokens) == self._block_size
            assert partial is None or 0 < len(partial.tokens) < self._block_size
        assert entries == len(self._blocks), "the index knows entries that no block holds"
        assert following == self._following, "entries that follow others are miscounted"
