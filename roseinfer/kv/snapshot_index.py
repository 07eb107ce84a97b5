"""Index of snapshots of states, which finds the longest one of a prefix."""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from roseinfer.kv.blocks import Chain, IndexEntry, PrefixIndex

# Insertions that a remembered look-up can be brought up to date with; after more of them it is made anew.
MAX_RECENT_COUNT = 256


class StateLookup(NamedTuple):
    """Result of a search for a snapshot among the first `upto` tokens of a sequence.

    `tokens`: position of the longest one, in `slot`; 0 = none. `entry`: the index's own object for it. `insertions`:
    the index's count at that time.
    """

    upto: int
    tokens: int
    slot: int
    entry: IndexEntry | None
    insertions: int


class SnapshotIndex(PrefixIndex):
    """Index over slots that hold states. `positions`: for each slot, the tokens before its newest snapshot."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        super().__init__(num_slots, block_size)
        self.positions = [0] * num_slots
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=MAX_RECENT_COUNT)  # position and key of insertions
        self._insertions = 0

    def record(self, slot: int, position: int) -> None:
        """Record that a snapshot at `position`, the index's newest entry, is in `slot`."""
        entry = self.full_entry(slot)
        assert entry is not None, f"slot {slot} has no snapshot"
        self.positions[slot] = position
        self._insertions += 1
        self._recent.append((position, entry.key))

    def find_longest(
        self, chain: Chain, tokens: Sequence[int], upto: int, before: StateLookup | None = None
    ) -> StateLookup:
        """Return the longest snapshot of a prefix with at most `upto` of a sequence's tokens.

        `before`: the previous result for the same sequence.
        """
        if before is not None and before.upto == upto and self._same(before, chain):
            return before
        size, blocks = self._block_size, upto // self._block_size
        if blocks:
            chain.entry(tokens, blocks - 1)  # makes the keys
            keys = chain.keys
            for number in range(blocks, 0, -1):
                if self.block_of(keys[number - 1]) is None:  # the common case
                    continue
                slot = self.find(chain.entry(tokens, number - 1))
                if slot is not None:
                    return StateLookup(upto, number * size, slot, self.full_entry(slot), self._insertions)
        return StateLookup(upto, 0, -1, None, self._insertions)

    def _same(self, before: StateLookup, chain: Chain) -> bool:
        """True if a new search would find the same."""
        if before.entry is not None and self.full_entry(before.slot) is not before.entry:
            return False
        new = self._insertions - before.insertions
        if new > len(self._recent):
            return False
        for position, key in islice(reversed(self._recent), new):
            if before.tokens < position <= before.upto and chain.keys[position // self._block_size - 1] == key:
                return False
        return True
