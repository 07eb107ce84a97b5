"""One KV group: block tables over one pool, with prefix index and copy-on-write.

Every block has at most one writer, the sequence that took it from the pool. A sequence that shares a partly filled last
block (an exact prefix hit or a fork) *borrows* it. It reads the slots filled so far and must copy the block before its
first append. Meanwhile the writer may append after the borrowed slots, since borrowers do not read those.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from roseinfer.core.plan import BlockCopy
from roseinfer.kv.blocks import BlockPool, Chain, IndexListener, PrefixIndex

AUDIT_PIECE_BLOCKS = 1024  # blocks checked before an audit pauses


@dataclass(frozen=True, slots=True)
class Growth:
    """Changes made by `grow`: the table now ends in `new_blocks`, from entry `table_from` on.

    `copy`: copy-on-write of a borrowed tail; its source stays referenced until `copies_done`. `windows`: the same in
    each window group.
    """

    table_from: int
    new_blocks: tuple[int, ...]
    copy: BlockCopy | None = None
    windows: tuple["Growth", ...] = ()


@dataclass(slots=True)
class BlockTable:
    """Blocks of one sequence in one group.

    `gone`: number of leading entries whose blocks the sequence does not hold, or no longer; they are undefined.
    `tail_borrowed`: the last block is partly filled and must not be written; `tail_tokens` of its slots may be read.
    `registered`: number of full blocks offered to the prefix index.
    """

    blocks: list[int] = field(default_factory=list)
    gone: int = 0
    tail_borrowed: bool = False
    tail_tokens: int = 0
    registered: int = 0
    partial_registered: bool = False

    @property
    def held(self) -> list[int]:
        """The blocks that the sequence references."""
        return self.blocks[self.gone :] if self.gone else self.blocks


class BlockGroup:
    """Block tables over one `BlockPool`. Its callers keep the tables, and end the copies with `copies_done`.

    All calls are O(blocks touched). Misuse (growth without room) asserts.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        spare_from: int | None = None,
        listener: IndexListener | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex(num_blocks, block_size, listener)
        self.pool = BlockPool(num_blocks, self.index.remove, spare_from)
        self._pinned: list[int] = []

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def capacity(self, table: BlockTable) -> int:
        """Return the number of positions that can be written without growing."""
        if table.tail_borrowed:
            return (len(table.blocks) - 1) * self.block_size + table.tail_tokens
        return len(table.blocks) * self.block_size

    # --- changes ------------------------------------------------------------------------------------------------
    def attach(self, table: BlockTable, blocks: Sequence[int], tokens: int, gone: int = 0) -> None:
        """Give an empty table the blocks of its sequence's first `tokens` tokens, shared with their other holders.

        `blocks` begin with the sequence's block number `gone`.
        """
        assert not table.blocks, "only an empty sequence can attach a hit"
        for block in blocks:
            self.pool.share(block)
        table.blocks, table.gone = [0] * gone + list(blocks), gone
        table.tail_tokens = tokens % self.block_size
        table.tail_borrowed = table.partial_registered = table.tail_tokens > 0
        table.registered = tokens // self.block_size

    def growth_cost(self, table: BlockTable, upto: int) -> int:
        """Return the blocks that `grow` would take from the pool."""
        return max(0, self.blocks_for(upto) - len(table.blocks)) + self._must_copy(table, upto)

    def can_grow(self, table: BlockTable, upto: int) -> bool:
        """True if there are enough free blocks to make positions below `upto` writable."""
        cost = self.growth_cost(table, upto)
        if cost <= self.pool.num_free:
            return True
        return cost - 1 <= self.pool.num_free and self._must_copy(table, upto) and self._reads_alone(table)

    def grow(self, table: BlockTable, upto: int) -> Growth:
        """Make positions below `upto` writable. The caller has checked `can_grow`."""
        cost = self.growth_cost(table, upto)
        if cost > self.pool.num_free:
            self._take_over(table)
            cost -= 1
        return self.extend(table, self.pool.take(cost), upto)

    def extend(self, table: BlockTable, new_blocks: tuple[int, ...], upto: int) -> Growth:
        """Add `growth_cost` blocks from the pool to a table, so that positions below `upto` are writable."""
        copy = None
        if self._must_copy(table, upto):
            src = table.blocks.pop()
            copy = BlockCopy(src, new_blocks[0], table.tail_tokens)
            self._pinned.append(src)  # our reference to the source becomes the copy's
            table.tail_borrowed, table.tail_tokens = False, 0
        table_from = len(table.blocks)
        table.blocks.extend(new_blocks)
        return Growth(table_from, new_blocks, copy)

    def undo(self, table: BlockTable, growth: Growth) -> None:
        """Revert a `grow` that no submitted step has seen."""
        assert tuple(table.blocks[growth.table_from :]) == growth.new_blocks, "only the newest growth can be undone"
        del table.blocks[growth.table_from :]
        if growth.copy is not None:
            self._pinned.remove(growth.copy.src)
            table.blocks.append(growth.copy.src)
            table.tail_borrowed, table.tail_tokens = True, growth.copy.tokens
        self._release(reversed(growth.new_blocks))

    def copies_done(self, copies: Iterable[BlockCopy]) -> None:
        """Release the sources of these copies, whose step is complete."""
        for copy in copies:
            self._pinned.remove(copy.src)
            self._release((copy.src,))

    def register(self, table: BlockTable, chain: Chain, tokens: Sequence[int], computed: int, prompt_len: int) -> None:
        """Offer computed blocks to the prefix index: full blocks, and the partly filled last block of the prompt.

        `tokens`: the sequence's known tokens. The K/V of the first `computed` is in the cache.
        """
        full = computed // self.block_size
        if computed >= prompt_len and not table.partial_registered:
            table.partial_registered = True
            last = prompt_len // self.block_size
            # A request that continues after outputs may have begun where its prompt has left the window.
            if prompt_len % self.block_size and last >= table.gone:
                self.index.insert(table.blocks[last], chain.entry(tokens[:prompt_len], last))
        for index in range(table.registered, full):
            self.index.insert(table.blocks[index], chain.entry(tokens, index))
        table.registered = max(table.registered, full)

    def release(self, table: BlockTable) -> None:
        """Release all blocks of a table, which is empty after that."""
        # The tail is freed first, so that the head of a chain, which more prompts share, is reused last.
        self._release(reversed(table.held))
        table.blocks, table.gone = [], 0
        table.tail_borrowed, table.tail_tokens, table.registered, table.partial_registered = False, 0, 0, False

    # --- inside -------------------------------------------------------------------------------------------------
    def _must_copy(self, table: BlockTable, upto: int) -> bool:
        return table.tail_borrowed and upto > self.capacity(table)

    def _reads_alone(self, table: BlockTable) -> bool:
        return self.pool.refs[table.blocks[-1]] == 1

    def _take_over(self, table: BlockTable) -> None:
        """Let the only reader of a borrowed tail become its writer, when no block is left to copy to.

        The block's content after our tokens is then no longer matchable.
        """
        self.index.remove_beyond(table.blocks[-1], table.tail_tokens)
        table.tail_borrowed, table.tail_tokens = False, 0

    def _release(self, blocks: Iterable[int]) -> None:
        self.pool.release(blocks, self.index.holds)

    # --- checks -------------------------------------------------------------------------------------------------
    def audit(self, tables: Iterable[tuple[str, BlockTable]], others: Iterable[int] = ()) -> Iterator[None]:
        """Raise AssertionError unless free + owned = total and every reference has exactly one owner: one of `tables`
        (by the sequence's id), a copy, or `others`, which names a block once for each reference.

        It pauses every 1,000 blocks or so, a millisecond or two. Nothing may change meanwhile.
        """
        owners = [0] * self.num_blocks
        writers: dict[int, str] = {}
        looked_at = 0
        for name, table in tables:
            held = table.held
            for block in held:
                owners[block] += 1
            assert len(set(held)) == len(held), f"{name!r} holds a block twice"
            if held and not table.tail_borrowed and table.registered < len(table.blocks):
                tail = held[-1]
                assert tail not in writers, f"{name!r} and {writers[tail]!r} both write block {tail}"
                writers[tail] = name
            looked_at += len(held)
            if looked_at >= AUDIT_PIECE_BLOCKS:
                looked_at = 0
                yield
        for block in (*self._pinned, *others):
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
