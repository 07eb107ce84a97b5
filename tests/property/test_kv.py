"""Random open, grow, undo, fork, register, release and close, with an integrity check after each."""

import random

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.kv.group import Growth
from tests.helpers.cases import examples
from tests.helpers.kv_managers import kv_manager


class Driver:
    """User of the manager, like the scheduler, with sequences over a tiny alphabet so that prefixes collide often."""

    def __init__(self, rng: random.Random, num_blocks: int, block_size: int) -> None:
        self.rng = rng
        self.kv = kv_manager(num_blocks, block_size, spare_from=num_blocks // 2)
        self.tokens: dict[str, list[int]] = {}
        self.prompt: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.pending: list = []
        self.names = 0
        # Waiting sequences: they are looked up repeatedly, and hold nothing.
        self.waiting = {f"w{i}": [rng.randrange(2) for _ in range(rng.randrange(1, 20))] for i in range(6)}
        for name in self.waiting:
            self.kv.open(name)

    def act(self) -> None:
        actions = [self.start, self.advance, self.advance, self.fork, self.end, self.preempt, self.finish_copies]
        self.rng.choice(actions)()
        self.kv.check_integrity()
        for name, tokens in self.waiting.items():
            if self.rng.random() < 0.8:
                self.look_up(name, tokens)

    def look_up(self, name: str, tokens: list[int]) -> None:
        """Check that remembered look-ups equal a new walk of the index."""
        walked = self.kv.index.match(self.kv.index.chain(""), tokens)
        assert self.kv.match(name, tokens) == walked
        if self.rng.random() < 0.05:
            tokens.append(self.rng.randrange(2))
        if self.rng.random() < 0.05 and self.tokens:
            self.kv.invalidate(self.rng.choice(list(self.tokens)))

    def start(self) -> None:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 14))]
        self.names += 1
        self._seat(str(self.names), tokens, len(tokens))

    def _seat(self, name: str, tokens: list[int], prompt_len: int) -> None:
        self.tokens[name], self.prompt[name] = tokens, prompt_len
        self.kv.open(name)
        hit = self.kv.match(name, tokens)
        assert hit.tokens <= len(tokens)
        self.kv.attach(name, hit)
        self.done[name] = hit.tokens

    def advance(self) -> None:
        if not self.tokens:
            return
        name = self.rng.choice(list(self.tokens))
        if self.done[name] == len(self.tokens[name]):
            self.tokens[name].append(self.rng.randrange(2))
        upto = self.rng.randrange(self.done[name] + 1, len(self.tokens[name]) + 1)
        free = self.kv.num_free
        growth = self.kv.grow(name, upto)
        if growth is None:
            assert self.kv.num_free == free
            return
        assert self.kv.capacity(name) >= upto
        if self.rng.random() < 0.2:
            self.kv.check_integrity()
            if growth.new_blocks:
                self.kv.undo(name, growth)
                assert self.kv.num_free == free
            return
        self._keep_copy(growth)
        self.done[name] = upto
        self.kv.register(name, self.tokens[name], upto, self.prompt[name])

    def _keep_copy(self, growth: Growth) -> None:
        if growth.copy is not None:
            self.pending.append(growth.copy)

    def fork(self) -> None:
        ready = [n for n in self.tokens if self.done[n] >= self.prompt[n]]
        if not ready:
            return
        parent = self.rng.choice(ready)
        self.names += 1
        child, length = str(self.names), self.prompt[parent]
        self.kv.open(child)
        self.kv.fork(parent, child, length)
        self.tokens[child], self.prompt[child] = self.tokens[parent][:length], length
        self.done[child] = length

    def preempt(self) -> None:
        if self.tokens:
            name = self.rng.choice(list(self.tokens))
            self.kv.release(name)
            self.kv.attach(name, self.kv.match(name, self.tokens[name]))
            self.done[name] = min(len(self.tokens[name]), self.kv.capacity(name))

    def end(self) -> None:
        if self.tokens:
            name = self.rng.choice(list(self.tokens))
            self.kv.close(name)
            del self.tokens[name], self.prompt[name], self.done[name]

    def finish_copies(self) -> None:
        self.kv.copies_done(self.pending)
        self.pending = []


@examples(150, derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 24), st.sampled_from([1, 2, 4, 8]))
def test_random_operations_keep_the_books(seed: int, num_blocks: int, block_size: int) -> None:
    driver = Driver(random.Random(seed), num_blocks, block_size)
    for _ in range(80):
        driver.act()
    driver.finish_copies()
    for name in [*driver.tokens, *driver.waiting]:
        driver.kv.close(name)
    driver.kv.check_integrity()
    assert driver.kv.num_free == num_blocks
