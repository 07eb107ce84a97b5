"""A fixed pool of KV blocks with reference counts and a least-recently-used free list."""

from collections.abc import Callable, Iterable, Iterator


class BlockPool:
    """Blocks 0 .. num_blocks - 1. A block is free while nobody references it.

    Free blocks form a doubly linked list threaded through two arrays, so that one can be taken from the middle in
    O(1) when the prefix cache matches it. Blocks are reused from the head; a block goes back to the tail if its
    content may be wanted again, to the head if not. `on_reuse(block)` is called when a block is about to be
    overwritten by a new owner.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None]) -> None:
        if num_blocks <= 0:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.num_free = num_blocks
        self._on_reuse = on_reuse
        # The list is a ring closed by a sentinel with index num_blocks.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out `count` blocks with one reference each. The caller has checked `num_free`."""
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
        for block in taken:
            self._on_reuse(block)
        return tuple(taken)

    def share(self, block: int) -> None:
        """Add a reference; a free block stops being free."""
        if self.refs[block] == 0:
            before, after = self._prev[block], self._next[block]
            self._next[before] = after
            self._prev[after] = before
            self.num_free -= 1
        self.refs[block] += 1

    def release(self, blocks: Iterable[int], keep: Callable[[int], bool]) -> None:
        """Drop one reference of each block; those nobody holds become free.

        Freed in the order given: blocks for which `keep(block)` holds are reused last, in that order.
        """
        for block in blocks:
            refs = self.refs[block] - 1
            assert refs >= 0, f"block {block} released more often than it was taken"
            self.refs[block] = refs
            if refs == 0:
                self._insert(block, at_tail=keep(block))

    def _insert(self, block: int, *, at_tail: bool) -> None:
        sentinel = self.num_blocks
        before = self._prev[sentinel] if at_tail else sentinel
        after = self._next[before]
        self._next[before], self._prev[after] = block, block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1

    def walk_free(self) -> Iterator[int]:
        """The free list in order of reuse; nothing may change meanwhile. For checks and tests."""
        block = self._next[self.num_blocks]
        for _ in range(self.num_blocks + 1):
            if block == self.num_blocks:
                return
            yield block
            block = self._next[block]
        raise AssertionError("the free list is a loop")
