"""KV cache as the scheduler sees it: sequences that match, grow, fork, register and close.

Every block has at most one writer, the sequence that took it from the pool. A sequence that shares a partly filled last
block (an exact prefix hit or a fork) *borrows* it. It reads the slots filled so far and must copy the block before its
first append. Meanwhile the writer may append after the borrowed slots, since borrowers do not read those.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.plan import BlockCopy, HostCopy
from roseinfer.kv.blocks import KEY_BYTES, BlockPool, Chain, Digest, Lookup, PrefixHit, PrefixIndex, sha256
from roseinfer.kv.events import CPU, GPU, KvEvents
from roseinfer.kv.host import HostCache

NO_HIT = PrefixHit()
AUDIT_PIECE_BLOCKS = 1024  # blocks checked before an audit pauses


@dataclass(frozen=True, slots=True)
class Growth:
    """Changes made by `grow`: the table now ends in `new_blocks`, from entry `table_from` on.

    `copy`: copy-on-write of a borrowed tail; its source stays referenced until `copies_done`.
    """

    table_from: int
    new_blocks: tuple[int, ...]
    copy: BlockCopy | None = None


@dataclass(slots=True)
class SequenceKv:
    """Blocks of one sequence.

    `tail_borrowed`: the last block is partly filled and must not be written; `tail_tokens` of its slots may be read.
    `registered`: number of full blocks offered to the prefix index. `lookup`: last result there; `host_lookup`: last
    result for the following blocks in host memory.
    """

    chain: Chain
    blocks: list[int] = field(default_factory=list)
    tail_borrowed: bool = False
    tail_tokens: int = 0
    registered: int = 0
    partial_registered: bool = False
    lookup: Lookup | None = None
    host_lookup: Lookup | None = None


class KvManager:
    """Block tables of all live sequences over one `BlockPool`, with prefix cache and copy-on-write.

    All calls are O(blocks touched). Misuse (an unknown sequence, growth without room) asserts. When blocks run out,
    calls return None.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        spare_from: int | None = None,
        num_host_blocks: int = 0,
        digest: Digest = sha256,
        events: KvEvents | None = None,
    ) -> None:
        """spare_from: blocks from there on are used only when no older block is free. num_host_blocks: blocks in host
        memory; `host` is their `HostCache`, or None without them or a prefix cache. events: collects which blocks are
        matchable.
        """
        if block_size <= 0 or block_size & (block_size - 1) or block_size > 256:
            raise ValueError(f"block_size must be a power of two up to 256, got {block_size}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex(num_blocks, block_size, digest, None if events is None else events.of(GPU))
        self.pool = BlockPool(num_blocks, self.index.remove, spare_from)
        self._sequences: dict[str, SequenceKv] = {}
        self._pinned: list[int] = []
        self.host: HostCache | None = None
        if num_host_blocks and prefix_caching:
            listener = None if events is None else events.of(CPU)
            self.host = HostCache(num_host_blocks, block_size, self.pool, self.index, digest, listener)

    # --- size ---------------------------------------------------------------------------------------------------
    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def max_tokens(self) -> int:
        """Return the longest sequence that the whole cache can hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def capacity(self, sequence_id: str) -> int:
        """Return the number of positions that can be written without growing."""
        seq = self._sequences[sequence_id]
        if seq.tail_borrowed:
            return (len(seq.blocks) - 1) * self.block_size + seq.tail_tokens
        return len(seq.blocks) * self.block_size

    def table(self, sequence_id: str) -> tuple[int, ...]:
        return tuple(self._sequences[sequence_id].blocks)

    # --- life of a sequence -------------------------------------------------------------------------------------
    def open(self, sequence_id: str, cache_salt: str = "", keys: Sequence[bytes] = ()) -> None:
        """Add a sequence without blocks. `keys`: `block_keys` of its tokens, if they were computed before."""
        assert sequence_id not in self._sequences, f"sequence {sequence_id!r} is open already"
        chain = self.index.chain(cache_salt)
        chain.keys += keys
        self._sequences[sequence_id] = SequenceKv(chain)

    def split_keys(self, packed: bytes, prompt_len: int) -> list[bytes]:
        """Split the concatenated keys of a prompt's full blocks. Return none if this cache does not use them.

        Raise `InvalidRequestError` if their number does not fit a prompt of this length.
        """
        if not packed or not self.prefix_caching:
            return []
        if len(packed) != prompt_len // self.block_size * KEY_BYTES:
            raise InvalidRequestError(f"keys must be those of blocks of {self.block_size} tokens", "keys")
        return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]

    def match(self, sequence_id: str, tokens: Sequence[int]) -> PrefixHit:
        """Return the longest cached prefix of `tokens`, the sequence's known tokens. Takes no blocks.

        The first call hashes and walks the prefix; later ones compare whether the index still holds the result.
        """
        if not self.prefix_caching:
            return NO_HIT
        seq = self._sequences[sequence_id]
        seq.lookup = self.index.look_up(seq.chain, tokens, seq.lookup)
        return seq.lookup.hit

    def attach(self, sequence_id: str, hit: PrefixHit) -> None:
        """Give an empty sequence the blocks of a hit, shared with their other holders."""
        seq = self._sequences[sequence_id]
        assert not seq.blocks, "only an empty sequence can attach a hit"
        for block in hit.blocks:
            self.pool.share(block)
        seq.blocks = list(hit.blocks)
        seq.tail_borrowed = hit.partial
        seq.tail_tokens = hit.tokens % self.block_size if hit.partial else 0
        seq.registered = hit.tokens // self.block_size
        seq.partial_registered = hit.partial

    def match_host(self, sequence_id: str, tokens: Sequence[int], hit: PrefixHit) -> tuple[int, ...]:
        """Return the host blocks that follow a hit that `match` has just returned, full blocks only.
        Takes no blocks.
        """
        if self.host is None or hit.partial:
            return ()
        seq = self._sequences[sequence_id]
        seq.host_lookup = self.host.look_up(seq.chain, tokens, len(hit.blocks), seq.host_lookup)
        return seq.host_lookup.hit.blocks

    def load(self, sequence_id: str, host_blocks: Sequence[int]) -> list[HostCopy]:
        """Add blocks to a sequence that holds only a hit of full blocks, and begin to load these host blocks into them.

        The caller has checked `num_free` and ends the loads with `host.finish_loads` or `host.cancel_loads`. The blocks
        must not be read before.
        """
        seq = self._sequences[sequence_id]
        assert self.host is not None and not seq.tail_borrowed, "only full blocks are loaded"
        blocks = self.pool.take(len(host_blocks))
        seq.blocks.extend(blocks)
        return self.host.begin_loads(host_blocks, blocks)

    def fork(self, parent_id: str, child_id: str, tokens: int) -> None:
        """Give an empty sequence the parent's first `tokens` tokens, whose K/V the parent has computed."""
        parent = self._sequences[parent_id]
        shared = self.blocks_for(tokens)
        assert shared <= len(parent.blocks), "the parent does not hold that many tokens"
        hit = PrefixHit(tokens, tuple(parent.blocks[:shared]), partial=tokens % self.block_size != 0)
        self.attach(child_id, hit)
        self._sequences[child_id].chain.share(parent.chain, tokens // self.block_size)
        self._sequences[child_id].partial_registered = False

    def growth_cost(self, sequence_id: str, upto: int) -> int:
        """Return the blocks that `grow` would take from the pool."""
        seq = self._sequences[sequence_id]
        return max(0, self.blocks_for(upto) - len(seq.blocks)) + self._must_copy(seq, upto)

    def grow(self, sequence_id: str, upto: int) -> Growth | None:
        """Make positions below `upto` writable. Return None and change nothing if there are not enough free blocks."""
        seq = self._sequences[sequence_id]
        must_copy = self._must_copy(seq, upto)
        count = max(0, self.blocks_for(upto) - len(seq.blocks))
        if count + must_copy > self.pool.num_free:
            if not (must_copy and count <= self.pool.num_free and self._take_over(seq)):
                return None
            must_copy = False
        return self._extend(seq, self.pool.take(count + must_copy), must_copy)

    def grow_many(self, wants: Sequence[tuple[str, int]]) -> list[Growth] | None:
        """Run `grow` for a whole batch of (sequence, upto), all or nothing, with one access to the pool."""
        sequences = [self._sequences[sequence_id] for sequence_id, _ in wants]
        copies = [self._must_copy(seq, upto) for seq, (_, upto) in zip(sequences, wants, strict=True)]
        counts = [
            max(0, self.blocks_for(upto) - len(seq.blocks)) + copy
            for seq, copy, (_, upto) in zip(sequences, copies, wants, strict=True)
        ]
        total = sum(counts)
        if total > self.pool.num_free:
            return None
        blocks, used, grown = self.pool.take(total), 0, []
        for seq, copy, count in zip(sequences, copies, counts, strict=True):
            grown.append(self._extend(seq, blocks[used : used + count], copy))
            used += count
        return grown

    def undo(self, sequence_id: str, growth: Growth) -> None:
        """Revert a `grow` that no submitted step has seen."""
        seq = self._sequences[sequence_id]
        assert tuple(seq.blocks[growth.table_from :]) == growth.new_blocks, "only the newest growth can be undone"
        del seq.blocks[growth.table_from :]
        if growth.copy is not None:
            self._pinned.remove(growth.copy.src)
            seq.blocks.append(growth.copy.src)
            seq.tail_borrowed, seq.tail_tokens = True, growth.copy.tokens
        self._release(reversed(growth.new_blocks))

    def copies_done(self, copies: Iterable[BlockCopy]) -> None:
        """Release the sources of these copies, whose step is complete."""
        for copy in copies:
            self._pinned.remove(copy.src)
            self._release((copy.src,))

    def register(self, sequence_id: str, tokens: Sequence[int], computed: int, prompt_len: int) -> None:
        """Offer computed blocks to the prefix index: full blocks, and the partly filled last block of the prompt.

        `tokens`: the sequence's known tokens. The K/V of the first `computed` is in the cache.
        """
        if not self.prefix_caching:
            return
        seq = self._sequences[sequence_id]
        full = computed // self.block_size
        if computed >= prompt_len and not seq.partial_registered:
            seq.partial_registered = True
            self._register_prompt_tail(seq, tokens, prompt_len)
        for index in range(seq.registered, full):
            self.index.insert(seq.blocks[index], seq.chain.entry(tokens, index))
        seq.registered = max(seq.registered, full)

    def invalidate(self, sequence_id: str) -> None:
        """Prevent matches of the sequence's blocks, because it failed."""
        blocks = self._sequences[sequence_id].blocks
        if self.host is not None:
            held = map(self.index.full_entry, blocks)
            self.host.invalidate(entry.key for entry in held if entry is not None)
        for block in blocks:
            self.index.remove(block)

    def release(self, sequence_id: str) -> None:
        """Release all blocks of a sequence, which stays open."""
        seq = self._sequences[sequence_id]
        # The tail is freed first, so that the head of a chain, which more prompts share, is reused last.
        self._release(reversed(seq.blocks))
        seq.blocks = []
        seq.tail_borrowed, seq.tail_tokens, seq.registered, seq.partial_registered = False, 0, 0, False

    def close(self, sequence_id: str) -> None:
        """Remove a sequence. Its blocks stay matchable until they are reused."""
        self.release(sequence_id)
        del self._sequences[sequence_id]

    # --- inside -------------------------------------------------------------------------------------------------
    def _must_copy(self, seq: SequenceKv, upto: int) -> bool:
        if not seq.tail_borrowed:
            return False
        return upto > (len(seq.blocks) - 1) * self.block_size + seq.tail_tokens

    def _take_over(self, seq: SequenceKv) -> bool:
        """Let the only reader of a borrowed tail become its writer, when no block is left to copy to.

        The block's content after our tokens is then no longer matchable.
        """
        block = seq.blocks[-1]
        if self.pool.refs[block] != 1:
            return False
        self.index.remove_beyond(block, seq.tail_tokens)
        seq.tail_borrowed, seq.tail_tokens = False, 0
        return True

    def _extend(self, seq: SequenceKv, new_blocks: tuple[int, ...], must_copy: bool) -> Growth:
        copy = None
        if must_copy:
            src = seq.blocks.pop()
            copy = BlockCopy(src, new_blocks[0], seq.tail_tokens)
            self._pinned.append(src)  # our reference to the source becomes the copy's
            seq.tail_borrowed, seq.tail_tokens = False, 0
        table_from = len(seq.blocks)
        seq.blocks.extend(new_blocks)
        return Growth(table_from, new_blocks, copy)

    def _register_prompt_tail(self, seq: SequenceKv, tokens: Sequence[int], prompt_len: int) -> None:
        index = prompt_len // self.block_size
        if prompt_len % self.block_size == 0:
            return
        self.index.insert(seq.blocks[index], seq.chain.entry(tokens[:prompt_len], index))

    def _release(self, blocks: Iterable[int]) -> None:
        self.pool.release(blocks, self.index.holds)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + owned = total and every reference has exactly one owner."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """Run `check_integrity` in pieces of some 1,000 blocks, a millisecond or two each. The cache must not change
        meanwhile.
        """
        owners = [0] * self.num_blocks
        writers: dict[int, str] = {}
        looked_at = 0
        for sequence_id, seq in self._sequences.items():
            for block in seq.blocks:
                owners[block] += 1
            assert len(set(seq.blocks)) == len(seq.blocks), f"{sequence_id!r} holds a block twice"
            if seq.blocks and not seq.tail_borrowed and seq.registered < len(seq.blocks):
                tail = seq.blocks[-1]
                assert tail not in writers, f"{sequence_id!r} and {writers[tail]!r} both write block {tail}"
                writers[tail] = sequence_id
            looked_at += len(seq.blocks)
            if looked_at >= AUDIT_PIECE_BLOCKS:
                looked_at = 0
                yield
        for block in (*self._pinned, *(self.host.referenced_blocks() if self.host is not None else ())):
            owners[block] += 1
        assert owners == self.pool.refs, "reference counts and owners disagree"
        free = 0
        for block in self.pool.walk_free():
            assert owners[block] == 0, "an owned block is in the free list"
            free += 1
            if free % AUDIT_PIECE_BLOCKS == 0:
                yield
        assert free == self.pool.num_free == owners.count(0), "free + owned != total"
        yield from self.index.audit(AUDIT_PIECE_BLOCKS)
        if self.host is not None:
            yield from self.host.audit(AUDIT_PIECE_BLOCKS)
