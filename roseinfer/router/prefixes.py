"""Model of an engine's prefix cache: the keys of the KV blocks that were sent to it."""

from collections.abc import Sequence

GENERATIONS_COUNT = 4


class CachedPrefixes:
    """Approximate LRU set of block keys, limited to the number of blocks of the engine.

    The order of use is kept in generations: sets of keys that were used at about the same time, each a quarter of the
    blocks. A use moves keys to the newest generation, and the oldest is dropped as a whole. Set operations take some 10
    ns per key.

    A key stands for its block and all blocks before it, and every use covers the whole chain. So if a block of a chain
    is present, all blocks before it are, and bisection finds the last one.

    `blocks`: of the engine. Blocks that hold no prompt, and those of requests that other processes send, reduce them;
    `add_other_blocks` counts these.
    """

    __slots__ = ("_blocks", "_generations", "_last_found", "_last_keys", "_others")

    def __init__(self, blocks: int) -> None:
        self._blocks = max(GENERATIONS_COUNT, blocks)
        self._generations: list[set[int]] = [set()]  # the oldest first
        self._others = [0.0]  # other blocks, by generation
        self._last_keys: Sequence[int] = ()  # of the last lookup; a placement repeats the lookup of the chosen engine
        self._last_found = 0

    def __len__(self) -> int:
        return sum([len(generation) for generation in self._generations])

    @property
    def used_blocks(self) -> float:
        return len(self) + sum(self._others)

    def cached_blocks(self, keys: Sequence[int], guess: int = 0) -> int:
        """Return how many blocks of the chain are expected to be cached. The search starts at `guess` blocks."""
        if keys is not self._last_keys:
            self._last_keys, self._last_found = keys, self._look_up(keys, guess)
        return self._last_found

    def _look_up(self, keys: Sequence[int], guess: int) -> int:
        if not keys or not self._contains(keys[0]):
            return 0
        low, high = 0, len(keys)  # block `low` of the chain is present, block `high` is not
        for probe in (guess - 1, guess) if guess else (high - 1,):
            if low < probe < high:
                low, high = (probe, high) if self._contains(keys[probe]) else (low, probe)
        while high - low > 1:
            probe = (low + high) // 2
            low, high = (probe, high) if self._contains(keys[probe]) else (low, probe)
        return low + 1

    def _contains(self, key: int) -> bool:
        for generation in self._generations:  # noqa: SIM110  # `any` would take three times as long
            if key in generation:
                return True
        return False

    def use(self, keys: Sequence[int], other_blocks: float = 0.0) -> None:
        """Record a request that uses the blocks of `keys` and `other_blocks` more."""
        cached = self.cached_blocks(keys)
        generations = self._generations
        newest = generations[-1]
        if cached:
            known, last, is_newer = keys[:cached], keys[cached - 1], False
            for generation in generations[:-1]:
                # The chain was used at least as recently as its last cached block: no older generation has any of it.
                is_newer = is_newer or last in generation
                if is_newer:
                    generation.difference_update(known)
        newest.update(keys)
        self._others[-1] += other_blocks
        self._last_keys = ()
        if len(newest) + self._others[-1] >= self._blocks / GENERATIONS_COUNT:
            self._begin_generation()

    def add_other_blocks(self, blocks: float) -> None:
        """Correct the number of other blocks; a negative number removes some that `use` has counted."""
        others = self._others
        others[-1] += max(0.0, blocks)
        for i in reversed(range(len(others))):
            removed = min(others[i], max(0.0, -blocks))
            others[i] -= removed
            blocks += removed

    def remove(self, keys: Sequence[int]) -> None:
        """Remove keys of blocks that were never computed."""
        for generation in self._generations:
            generation.difference_update(keys)
        self._last_keys = ()

    def _begin_generation(self) -> None:
        """Begin a new generation; drop the oldest ones while there are too many blocks."""
        while self._generations and self.used_blocks > self._blocks * (1 - 0.5 / GENERATIONS_COUNT):
            del self._generations[0], self._others[0]
        self._generations.append(set())
        self._others.append(0.0)
