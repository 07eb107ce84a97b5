"""Which prefixes an engine is thought to hold: the keys of the KV blocks of what was sent there."""

from collections.abc import Sequence

GENERATIONS = 4


class HeldPrefixes:
    """Keys of blocks in the order of their last use, the oldest dropped once there are more than an engine has blocks.

    The order is kept in generations: sets of keys that were used at about the same time, of a quarter of the blocks
    each. What a request uses moves to the newest, and the oldest goes as a whole. All of it is operations on sets,
    which take some 10 ns a key.

    A key stands for all blocks before its own, and whoever uses it uses these: if a chain's block is there, so are
    those before it, and the last one that is there can be found by bisection.

    `blocks`: how many the engine has. Blocks that hold no prompt, and what others send there, take their part of them:
    `taken` counts these.
    """

    __slots__ = ("_blocks", "_generations", "_others")

    def __init__(self, blocks: int) -> None:
        self._blocks = max(GENERATIONS, blocks)
        self._generations: list[set[int]] = [set()]
        self._others = [0.0]  # blocks of each generation that are of something else

    def __len__(self) -> int:
        return sum([len(generation) for generation in self._generations])

    @property
    def used(self) -> float:
        """Blocks."""
        return len(self) + sum(self._others)

    def held(self, keys: Sequence[int]) -> int:
        """How many blocks of the chain are thought to be there."""
        generations = self._generations
        if not keys:
            return 0
        first = keys[0]
        for generation in generations:
            if first in generation:
                break
        else:
            return 0
        low, high = 0, len(keys)  # the chain's block `low` is there, block `high` is not
        middle = high - 1  # mostly the whole of a prompt that came before, or a part of it
        while high - low > 1:
            key = keys[middle]
            for generation in generations:
                if key in generation:
                    low = middle
                    break
            else:
                high = middle
            middle = (low + high) // 2
        return low + 1

    def use(self, keys: Sequence[int], others: float = 0.0) -> None:
        """A request that uses these blocks, and `others` more."""
        generations = self._generations
        for generation in generations[:-1]:
            generation.difference_update(keys)
        newest = generations[-1]
        newest.update(keys)
        self._others[-1] += others
        if len(newest) + self._others[-1] >= self._blocks / GENERATIONS:
            self._turn()

    def taken(self, blocks: float) -> None:
        """So many blocks went to something else; negative: fewer than `use` was told."""
        self._others[-1] = max(0.0, self._others[-1] + blocks)

    def drop(self, keys: Sequence[int]) -> None:
        """These never came to be there."""
        for generation in self._generations:
            generation.difference_update(keys)

    def _turn(self) -> None:
        """Begin a new generation, and drop the oldest as long as there are too many blocks."""
        while self._generations and self.used > self._blocks * (1 - 0.5 / GENERATIONS):
            del self._generations[0], self._others[0]
        self._generations.append(set())
        self._others.append(0.0)
