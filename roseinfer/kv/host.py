"""A second pool of blocks, in host memory, behind the same keys; and what is on its way between it and the KV blocks.

Only full blocks are kept there. A copy under way holds a reference on both sides, whatever becomes of the sequences
that wanted it: neither side is anybody else's before the copy is done. Each insertion into an index has an
`IndexEntry` of its own, because a look-up knows by identity whether what it found has stayed.
"""

from collections.abc import Iterable, Iterator, Sequence

from roseinfer.core.plan import HostCopy
from roseinfer.kv.blocks import BlockPool, Chain, Digest, IndexEntry, IndexListener, Lookup, PrefixIndex


class HostCache:
    """`num_blocks` host blocks beside the KV blocks of `pool`, of which `index` knows the content.

    Of the blocks that are kept the least recently used makes room for a new one. Who uses it: `store` and `load` begin
    copies, `stored`, `loaded` end them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        pool: BlockPool,
        index: PrefixIndex,
        digest: Digest,
        listener: IndexListener | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._kv_pool, self._kv_index = pool, index
        self._index = PrefixIndex(num_blocks, block_size, digest, listener)
        self._pool = BlockPool(num_blocks, self._index.forget)
        # What copies under way will leave, by the block that they write; None if it must not be matched.
        self._storing: dict[int, tuple[int, IndexEntry | None]] = {}
        self._loading: dict[int, tuple[int, IndexEntry | None]] = {}
        self._storing_keys: set[bytes] = set()
        self._rescued: set[int] = set()  # KV blocks being stored before others get them
        self._rescued_at = 0  # so many KV blocks were given away then
        self._loading_keys: set[bytes] = set()

    @property
    def num_storing(self) -> int:
        """KV blocks that are being stored."""
        return len(self._storing)

    @property
    def num_used(self) -> int:
        """Host blocks that hold something, or will."""
        return len(self._index) + len(self._storing)

    def look_up(self, chain: Chain, tokens: Sequence[int], first: int, before: Lookup | None) -> Lookup:
        """Which blocks of a sequence are kept here, from block `first` on; `before`: what the last call gave."""
        return self._index.look_up(chain, tokens, before, first)

    def arriving(self, hosts: Sequence[int]) -> bool:
        """Whether what one of these host blocks holds is being loaded already."""
        keys = self._loading_keys
        return bool(keys) and any(self._entry(host).key in keys for host in hosts)

    def _entry(self, host: int) -> IndexEntry:
        entry = self._index.full(host)
        assert entry is not None, f"host block {host} holds nothing"
        return entry

    # --- to the host --------------------------------------------------------------------------------------------
    def wants(self, block: int) -> bool:
        """Whether a KV block holds something whole that is not kept here, and on no way to here."""
        entry = self._kv_index.full(block)
        return entry is not None and entry.key not in self._storing_keys and self._index.where(entry.key) is None

    def held(self, block: int) -> IndexEntry | None:
        """What a KV block holds if that is whole, as an object that no other content will be."""
        return self._kv_index.full(block)

    def touch(self, blocks: Sequence[int]) -> None:
        """What these KV blocks hold, the head of a chain first, was used: as far as it is kept here, it goes last."""
        for block in reversed(blocks):
            entry = self._kv_index.full(block)
            host = None if entry is None else self._index.where(entry.key)
            if host is not None:
                self._pool.share(host)
                self._pool.release((host,), self._index.holds)

    def store(self, block: int) -> HostCopy | None:
        """Begin to keep what a KV block holds. None if it is not wanted, or every host block is in use by copies."""
        entry = self._kv_index.full(block)
        if entry is None or not self.wants(block) or not self._pool.num_free:
            return None
        (host,) = self._pool.take(1)
        self._kv_pool.share(block)
        self._storing[host] = (block, entry)
        self._storing_keys.add(entry.key)
        return HostCopy(block, host)

    @property
    def num_rescued(self) -> int:
        """KV blocks that nobody had when `rescue` began to store them, which goes on."""
        return len(self._rescued)

    def rescue_due(self, ahead: int) -> bool:
        """Whether a quarter of `ahead` KV blocks was given away since `rescue` has looked at all of them."""
        return self._kv_pool.num_taken - self._rescued_at >= ahead // 4

    def rescue(self, ahead: int, most: int) -> list[HostCopy]:
        """Begin to keep up to `most` of the `ahead` KV blocks that are given to others next, whoever used them."""
        found: list[HostCopy] = []
        for block in self._kv_pool.next_taken(ahead):
            if len(found) == most:
                return found
            copy = self.store(block)
            if copy is not None:
                self._rescued.add(block)
                found.append(copy)
        self._rescued_at = self._kv_pool.num_taken
        return found

    def stored(self, copies: Sequence[HostCopy]) -> None:
        """These stores are done; the head of a chain comes first, and makes room last.

        A block that was rescued is given to others as soon as it would have been.
        """
        for block, host in reversed(copies):
            _, entry = self._storing.pop(host)
            rescued = block in self._rescued
            self._rescued.discard(block)
            self._kv_pool.release((block,), _no if rescued else self._kv_index.holds)
            if entry is not None:
                self._storing_keys.discard(entry.key)
                self._index.insert(host, IndexEntry(*entry))
            self._pool.release((host,), self._index.holds)

    # --- from the host ------------------------------------------------------------------------------------------
    def load(self, hosts: Sequence[int], blocks: Sequence[int]) -> list[HostCopy]:
        """Begin to load these host blocks, none of which is `arriving`, into KV blocks that were taken for it."""
        copies = []
        for host, block in zip(hosts, blocks, strict=True):
            entry = self._entry(host)
            assert entry.key not in self._loading_keys, "nothing is loaded twice at once"
            self._pool.share(host)
            self._kv_pool.share(block)
            self._loading[block] = (host, entry)
            self._loading_keys.add(entry.key)
            copies.append(HostCopy(block, host))
        return copies

    def loaded(self, copies: Sequence[HostCopy]) -> None:
        """These loads are done: their KV blocks can be matched from now on."""
        for block, entry in self._end_loads(copies):
            if entry is not None:
                self._kv_index.insert(block, IndexEntry(*entry))
            self._kv_pool.release((block,), self._kv_index.holds)

    def drop(self, copies: Sequence[HostCopy]) -> None:
        """These loads will not happen: no plan has them."""
        for block, _ in self._end_loads(copies):
            self._kv_pool.release((block,), self._kv_index.holds)

    def _end_loads(self, copies: Sequence[HostCopy]) -> Iterator[tuple[int, IndexEntry | None]]:
        for block, host in reversed(copies):
            _, entry = self._loading.pop(block)
            if entry is not None:
                self._loading_keys.discard(entry.key)
            self._pool.release((host,), self._index.holds)
            yield block, entry

    # --- what must not be matched ---------------------------------------------------------------------------------
    def distrust(self, keys: Iterable[bytes]) -> None:
        """What has these keys must not be matched again, be it here already or under way in either direction."""
        bad = set(keys)
        for key in bad:
            host = self._index.where(key)
            if host is not None:
                self._index.forget(host)
        for under_way, known in ((self._storing, self._storing_keys), (self._loading, self._loading_keys)):
            if not known.isdisjoint(bad):
                known -= bad
                for target, (source, entry) in under_way.items():
                    if entry is not None and entry.key in bad:
                        under_way[target] = (source, None)

    # --- looking in -----------------------------------------------------------------------------------------------
    def pins(self) -> Iterator[int]:
        """The KV blocks that copies under way hold, once for each."""
        yield from self._loading
        yield from (block for block, _ in self._storing.values())

    def audit(self, piece: int) -> Iterator[None]:
        """Raise AssertionError if references, copies under way and the index disagree; pauses every `piece` blocks."""
        owners = [0] * self.num_blocks
        for host in self._storing:
            owners[host] += 1
            assert not self._index.holds(host), "a host block is matched before it is stored"
        for host, _ in self._loading.values():
            owners[host] += 1
        assert owners == self._pool.refs, "reference counts of host blocks and copies under way disagree"
        free = 0
        for block in self._pool.walk_free():
            assert owners[block] == 0, "a host block that a copy needs is in the free list"
            free += 1
            if free % piece == 0:
                yield
        assert free == self._pool.num_free == owners.count(0), "host blocks: free + owned != total"
        for under_way, known in ((self._storing, self._storing_keys), (self._loading, self._loading_keys)):
            keys = {entry.key for _, entry in under_way.values() if entry is not None}
            assert keys == known, "keys of copies under way"
        yield from self._index.audit(piece)


def _no(block: int) -> bool:
    """Nobody wants a copy's KV block back: host memory has what it holds."""
    return False
