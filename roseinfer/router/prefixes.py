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

    __slots__ = ("_asked", "_blocks", "_found", "_generations", "_others")

    def __init__(self, blocks: int) -> None:
        self._blocks = max(GENERATIONS, blocks)
        self._generations: list[set[int]] = [set()]  # the oldest first
        self._others = [0.0]  # blocks of each generation that are of something else
        self._asked: Sequence[int] = ()  # last, and what was found: who chooses asks, and asks again when it has chosen
        self._found = 0

    def __len__(self) -> int:
        return sum([len(generation) for generation in self._generations])

    @property
    def used(self) -> float:
        """Blocks."""
        return len(self) + sum(self._others)

    def held(self, keys: Sequence[int], guess: int = 0) -> int:
        """How many blocks of the chain are thought to be there. `guess`: as many as another engine holds, maybe."""
        if keys is not self._asked:
            self._asked, self._found = keys, self._look_up(keys, guess)
        return self._found

    def _look_up(self, keys: Sequence[int], guess: int) -> int:
        if not keys or not self._holds(keys[0]):
            return 0
        low, high = 0, len(keys)  # the chain's block `low` is there, block `high` is not
        for probe in (guess - 1, guess) if guess else (high - 1,):
            if low < probe < high:
                low, high = (probe, high) if self._holds(keys[probe]) else (low, probe)
        while high - low > 1:
            probe = (low + high) // 2
            low, high = (probe, high) if self._holds(keys[probe]) else (low, probe)
        return low + 1

    def _holds(self, key: int) -> bool:
        for generation in self._generations:  # noqa: SIM110  # `any` would take three times as long
            if key in generation:
                return True
        return False

    def use(self, keys: Sequence[int], others: float = 0.0) -> None:
        """A request that uses these blocks, and `others` more."""
        held = self.held(keys)
        generations = self._generations
        newest = generations[-1]
        if held:
            known, last, behind = keys[:held], keys[held - 1], False
            for generation in generations[:-1]:
                behind = behind or last in generation
                if behind:  # what is used at least as lately as the last block: no older generation has any
                    generation.difference_update(known)
        newest.update(keys)
        self._others[-1] += others
        self._asked = ()
        if len(newest) + self._others[-1] >= self._blocks / GENERATIONS:
            self._turn()

    def taken(self, blocks: float) -> None:
        """So many blocks more went to something else; negative: fewer than `use` was told."""
        others = self._others
        others[-1] += max(0.0, blocks)
        for place in reversed(range(len(others))):
            back = min(others[place], max(0.0, -blocks))
            others[place] -= back
            blocks += back

    def drop(self, keys: Sequence[int]) -> None:
        """These never came to be there."""
        for generation in self._generations:
            generation.difference_update(keys)
        self._asked = ()

    def _turn(self) -> None:
        """Begin a new generation, and drop the oldest as long as there are too many blocks."""
        while self._generations and self.used > self._blocks * (1 - 0.5 / GENERATIONS):
            del self._generations[0], self._others[0]
        self._generations.append(set())
        self._others.append(0.0)
