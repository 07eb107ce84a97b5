"""Second block pool in host memory with the same keys, and the copies between it and the KV blocks.

Only full blocks are stored there. A running copy holds a reference on both sides, even if the sequences that wanted it
end: neither block is reused before the copy is done. Each insertion into an index uses a new `IndexEntry`, because a
look-up recognises by identity whether its result is unchanged.
"""

from collections.abc import Iterable, Iterator, Sequence

from roseinfer.core.plan import HostCopy
from roseinfer.kv.blocks import BlockPool, Chain, IndexEntry, Lookup, PrefixIndex


class HostCache:
    """`num_blocks` host blocks beside the KV blocks of `pool`, whose content `index` knows.

    The least recently used host block makes room for a new one. `begin_store` and `begin_loads` begin copies,
    `finish_stores` and `finish_loads` end them. `host_index`: an empty index for the host blocks.
    """

    def __init__(self, num_blocks: int, pool: BlockPool, index: PrefixIndex, host_index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self._kv_pool, self._kv_index = pool, index
        self.index = host_index
        self._pool = BlockPool(num_blocks, self.index.remove)
        # Source and future entry of running copies by target block. The entry is None if it must not be matched.
        self._storing: dict[int, tuple[int, IndexEntry | None]] = {}
        self._loading: dict[int, tuple[int, IndexEntry | None]] = {}
        self._storing_keys: set[bytes] = set()
        self._evicting: set[int] = set()  # KV blocks being stored because they will be reused soon
        self._taken_at_scan = 0  # `num_taken` when all candidates were last examined
        self._loading_keys: set[bytes] = set()

    @property
    def num_storing(self) -> int:
        """Return the number of KV blocks being stored."""
        return len(self._storing)

    @property
    def num_used(self) -> int:
        """Return the number of host blocks that hold an entry or are being written."""
        return len(self.index) + len(self._storing)

    def look_up(self, chain: Chain, tokens: Sequence[int], first: int, before: Lookup | None) -> Lookup:
        """Return which blocks of a sequence are in host memory, from block `first` on. `before`:
        the previous result.
        """
        return self.index.look_up(chain, tokens, before, first)

    def is_loading(self, host_blocks: Sequence[int]) -> bool:
        """True if the content of any of these host blocks is already being loaded."""
        keys = self._loading_keys
        return bool(keys) and any(self._entry(host).key in keys for host in host_blocks)

    def _entry(self, host: int) -> IndexEntry:
        entry = self.index.full_entry(host)
        assert entry is not None, f"host block {host} holds nothing"
        return entry

    # --- to the host --------------------------------------------------------------------------------------------
    def should_store(self, block: int) -> bool:
        """True if a KV block holds a full entry that is neither in host memory nor being stored."""
        entry = self._kv_index.full_entry(block)
        return entry is not None and entry.key not in self._storing_keys and self.index.block_of(entry.key) is None

    def full_entry(self, block: int) -> IndexEntry | None:
        """Return a KV block's full entry, as an object whose identity is unique to this content."""
        return self._kv_index.full_entry(block)

    def touch(self, blocks: Sequence[int]) -> None:
        """Mark the content of these KV blocks (head of a chain first) as recently used in host memory."""
        for block in reversed(blocks):
            entry = self._kv_index.full_entry(block)
            host = None if entry is None else self.index.block_of(entry.key)
            if host is not None:
                self.touch_host(host)

    def touch_host(self, host: int) -> None:
        """Mark a host block as recently used."""
        self._pool.share(host)
        self._pool.release((host,), self.index.holds)

    def begin_store(self, block: int) -> HostCopy | None:
        """Begin to store a KV block. Return None if that is not needed or copies use every host block."""
        entry = self._kv_index.full_entry(block)
        if entry is None or not self.should_store(block) or not self._pool.num_free:
            return None
        (host,) = self._pool.take(1)
        self._kv_pool.share(block)
        self._storing[host] = (block, entry)
        self._storing_keys.add(entry.key)
        return HostCopy(block, host)

    @property
    def num_evicting(self) -> int:
        """Return the number of free KV blocks that `store_next_evicted` is storing."""
        return len(self._evicting)

    def eviction_near(self, ahead: int) -> bool:
        """True if a quarter of `ahead` KV blocks was taken since `store_next_evicted` last examined all candidates."""
        return self._kv_pool.num_taken - self._taken_at_scan >= ahead // 4

    def store_next_evicted(self, ahead: int, most: int) -> list[HostCopy]:
        """Begin to store up to `most` of the next `ahead` free KV blocks to be reused."""
        found: list[HostCopy] = []
        for block in self._kv_pool.next_free(ahead):
            if len(found) == most:
                return found
            copy = self.begin_store(block)
            if copy is not None:
                self._evicting.add(block)
                found.append(copy)
        self._taken_at_scan = self._kv_pool.num_taken
        return found

    def finish_stores(self, copies: Sequence[HostCopy]) -> None:
        """End these stores; the head of a chain comes first and is evicted last.

        Blocks stored by `store_next_evicted` return to the head of the free list.
        """
        for block, host in reversed(copies):
            _, entry = self._storing.pop(host)
            rescued = block in self._evicting
            self._evicting.discard(block)
            self._kv_pool.release((block,), _no if rescued else self._kv_index.holds)
            if entry is not None:
                self._storing_keys.discard(entry.key)
                self.index.insert(host, IndexEntry(*entry))
            self._pool.release((host,), self.index.holds)

    # --- from the host ------------------------------------------------------------------------------------------
    def begin_loads(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> list[HostCopy]:
        """Begin to load these host blocks, none of which `is_loading`, into KV blocks that were taken for it."""
        copies = []
        for host, block in zip(host_blocks, blocks, strict=True):
            entry = self._entry(host)
            assert entry.key not in self._loading_keys, "nothing is loaded twice at once"
            self._pool.share(host)
            self._kv_pool.share(block)
            self._loading[block] = (host, entry)
            self._loading_keys.add(entry.key)
            copies.append(HostCopy(block, host))
        return copies

    def finish_loads(self, copies: Sequence[HostCopy]) -> None:
        """End these loads: their KV blocks become matchable."""
        for block, entry in self._end_loads(copies):
            if entry is not None:
                self._kv_index.insert(block, IndexEntry(*entry))
            self._kv_pool.release((block,), self._kv_index.holds)

    def cancel_loads(self, copies: Sequence[HostCopy]) -> None:
        """Drop these loads, which are in no plan."""
        for block, _ in self._end_loads(copies):
            self._kv_pool.release((block,), self._kv_index.holds)

    def _end_loads(self, copies: Sequence[HostCopy]) -> Iterator[tuple[int, IndexEntry | None]]:
        for block, host in reversed(copies):
            _, entry = self._loading.pop(block)
            if entry is not None:
                self._loading_keys.discard(entry.key)
            self._pool.release((host,), self.index.holds)
            yield block, entry

    # --- what must not be matched ---------------------------------------------------------------------------------
    def invalidate(self, keys: Iterable[bytes]) -> None:
        """Prevent entries with these keys from being matched, whether stored or being copied in either direction."""
        bad = set(keys)
        for key in bad:
            host = self.index.block_of(key)
            if host is not None:
                self.index.remove(host)
        for under_way, known in ((self._storing, self._storing_keys), (self._loading, self._loading_keys)):
            if not known.isdisjoint(bad):
                known -= bad
                for target, (source, entry) in under_way.items():
                    if entry is not None and entry.key in bad:
                        under_way[target] = (source, None)

    # --- looking in -----------------------------------------------------------------------------------------------
    def referenced_blocks(self) -> Iterator[int]:
        """Yield each KV block that a running copy references."""
        yield from self._loading
        yield from (block for block, _ in self._storing.values())

    def audit(self, piece: int) -> Iterator[None]:
        """Raise AssertionError if references, running copies and the index disagree; pause every `piece` blocks."""
        owners = [0] * self.num_blocks
        for host in self._storing:
            owners[host] += 1
            assert not self.index.holds(host), "a host block is matched before it is stored"
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
        yield from self.index.audit(piece)


def _no(block: int) -> bool:
    """Return False: the block can be reused first, since host memory holds its content."""
    return False
