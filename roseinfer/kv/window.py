"""KV group of layers with an attention window: a sequence releases the blocks that no later token sees."""

from collections.abc import Sequence
from typing import NamedTuple

from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import WindowPool
from roseinfer.kv.blocks import Chain
from roseinfer.kv.group import BlockGroup, BlockTable


class WindowHit(NamedTuple):
    """Cached blocks of a sequence, from its block `first` on."""

    first: int
    blocks: tuple[int, ...]


class WindowGroup(BlockGroup):
    """Block tables whose leading blocks have left the window.

    A prefix can be continued at position p if the blocks of the window before p are there. Blocks in the middle of a
    prompt are rarely wanted again, and a long prompt has more of them than the pool may have. So those that leave the
    window are reused first, except in front of positions where prompts have diverged or ended (`leave`).

    Everything here keeps one token more than the window, since the last token of a cached prefix may be computed again.
    """

    def __init__(self, pool: WindowPool, block_size: int, step_tokens: int) -> None:
        """step_tokens: most tokens of a row. Raise `ConfigError` if the pool cannot hold one sequence."""
        super().__init__(pool.num_blocks, block_size)
        self.window = pool.window
        # A chunk of a prompt needs the window before it, and both may begin and end within a block.
        self.most_blocks = self.blocks_for(pool.window + step_tokens) + 1
        if pool.num_blocks < self.most_blocks:
            raise ConfigError(
                f"a window of {pool.window} tokens and steps of {step_tokens} need {self.most_blocks} blocks, "
                f"not {pool.num_blocks}"
            )

    def first_needed(self, position: int) -> int:
        """Return the first block that a token at `position`, or the one before it, sees."""
        return max(0, position - self.window) // self.block_size

    def longest(self, chain: Chain, tokens: Sequence[int], upto: int) -> int:
        """Return the last position up to `upto` before which the whole window is cached: `upto`, or the end of a full
        block. `tokens` has at least `upto` tokens.
        """
        end = upto
        while end:
            missing = self._last_missing(chain, tokens, end)
            if missing is None:
                break
            end = missing * self.block_size
        return end

    def window_before(self, chain: Chain, tokens: Sequence[int], upto: int) -> WindowHit:
        """Return the cached blocks that a continuation at `upto`, a result of `longest`, needs."""
        first = self.first_needed(upto)
        found = [self._find(chain, tokens, index, upto) for index in range(first, self.blocks_for(upto))]
        return WindowHit(first, tuple(block for block in found if block is not None))

    def most_growth(self, table: BlockTable, upto: int) -> int:
        """Return the most blocks that the sequence takes at any time until it has computed `upto` tokens."""
        held = len(table.blocks) - table.gone
        return max(0, min(self.growth_cost(table, upto), self.most_blocks + table.tail_borrowed - held))

    def leave(self, table: BlockTable, computed: int, wanted: Sequence[int]) -> None:
        """Release the blocks that tokens from position `computed` on do not see.

        Those before one of the positions `wanted` are kept as long as other cached prefixes.
        """
        first = self.first_needed(computed)
        if first <= table.gone:
            return
        kept = set[int]()
        for end in wanted:
            kept.update(range(max(table.gone, self.first_needed(end)), min(first, self.blocks_for(end))))
        self.pool.release_early(table.blocks[i] for i in range(table.gone, first) if i not in kept)
        self._release(table.blocks[i] for i in sorted(kept, reverse=True))
        table.gone = first

    def invalidate(self, table: BlockTable, chain: Chain) -> None:
        """Prevent matches of all blocks that the sequence has registered, also of those that it has released."""
        for block in table.held:
            self.index.remove(block)
        for key in chain.keys[: table.registered]:
            released = self.index.block_of(key)
            if released is not None:
                self.index.remove(released)

    def _last_missing(self, chain: Chain, tokens: Sequence[int], end: int) -> int | None:
        """Return the last block of the window before `end` that is not cached."""
        for index in reversed(range(self.first_needed(end), self.blocks_for(end))):
            if self._find(chain, tokens, index, end) is None:
                return index
        return None

    def _find(self, chain: Chain, tokens: Sequence[int], index: int, end: int) -> int | None:
        """Return the block that holds the sequence's block `index`, as far as it is before position `end`."""
        known = tokens[:end] if (index + 1) * self.block_size > end else tokens
        return self.index.find(chain.entry(known, index))
