"""Random use of KV blocks with a second pool in host memory, with an integrity check after each operation.

The content of a block stands for its tokens and all tokens before it. Every matched block must have this content.
"""

import random

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.plan import HostCopy
from roseinfer.kv.blocks import PrefixHit
from roseinfer.kv.events import KvEvents
from roseinfer.kv.manager import HostHit
from tests.helpers.cases import examples
from tests.helpers.kv_managers import kv_manager

Content = tuple[int, ...] | None


class Driver:
    """User whose copies complete some time after they start. `sequences`: their tokens; `loading`: waiting ones."""

    def __init__(
        self, rng: random.Random, num_blocks: int, num_host: int, block_size: int, events: KvEvents | None = None
    ) -> None:
        self.rng, self.size = rng, block_size
        self.kv = kv_manager(num_blocks, block_size, num_host_blocks=num_host, events=events)
        assert self.kv.host is not None
        self.host = self.kv.host
        self.device_holds: list[Content] = [None] * num_blocks
        self.host_holds: list[Content] = [None] * num_host
        self.sequences: dict[str, list[int]] = {}
        self.loading: dict[str, list[HostCopy]] = {}
        self.orphans: list[list[HostCopy]] = []  # loads in flight of sequences that have ended
        self.stores: list[HostCopy] = []
        self.bad: set[tuple[int, ...]] = set()
        self.loads = self.names = 0
        # They are looked up repeatedly, and hold nothing.
        self.waiting = {f"w{i}": self.prompt() for i in range(6)}
        for name in self.waiting:
            self.kv.open(name)

    def act(self) -> None:
        actions = [self.start, self.start, self.extend, self.end, self.preempt, self.store, self.finish_stores]
        actions.append(self.rescue)
        self.rng.choice([*actions, self.finish_load, self.drop_load, self.fail, self.end_loading])()
        self.kv.check_integrity()
        for name, tokens in self.waiting.items():
            if self.rng.random() < 0.5:
                self.look_up(name, tokens)

    def prompt(self) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 6 * self.size))]

    def look_up(self, name: str, tokens: list[int]) -> tuple[PrefixHit, HostHit]:
        """Check that remembered look-ups equal a new walk, and that their blocks have the right content."""
        hit = self.kv.match(name, tokens)
        assert hit == self.kv.index.match(self.kv.index.chain(""), tokens)
        full = hit.blocks[: hit.tokens // self.size]
        self.check(self.device_holds, full, tokens, 0)
        host_hit = self.kv.match_host(name, tokens, hit)
        host_blocks = host_hit.blocks
        assert list(host_blocks) == ([] if hit.partial else self.walk(tokens, len(full)))
        self.check(self.host_holds, host_blocks, tokens, len(full))
        return hit, host_hit

    def start(self) -> None:
        self.names += 1
        name, tokens = str(self.names), self.prompt()
        self.kv.open(name)
        hit, host_hit = self.look_up(name, tokens)
        self.kv.attach(name, hit)
        self.host.touch(hit.blocks)
        fits = len(host_hit.blocks) <= self.kv.num_free and not self.host.is_loading(host_hit.blocks)
        if host_hit and fits and self.rng.random() < 0.8:
            self.loading[name] = self.kv.load(name, host_hit)
            self.loads += 1
            return
        if not self.grow(name, len(tokens)):
            self.kv.close(name)
            return
        self.sequences[name] = tokens
        self.compute(name)

    def grow(self, name: str, upto: int) -> bool:
        growth = self.kv.grow(name, upto)
        if growth is not None and growth.copy is not None:
            self.kv.copies_done([growth.copy])
        return growth is not None

    def walk(self, tokens: list[int], first: int) -> list[int]:
        chain, found = self.kv.index.chain(""), []
        for index in range(first, len(tokens) // self.size):
            host = self.host.index.block_of(chain.entry(tokens, index).key)
            if host is None:
                break
            found.append(host)
        return found

    def check(self, holds: list[Content], blocks: tuple[int, ...], tokens: list[int], first: int) -> None:
        for index, block in enumerate(blocks, start=first):
            wanted = tuple(tokens[: (index + 1) * self.size])
            assert holds[block] == wanted and wanted not in self.bad

    def compute(self, name: str) -> None:
        tokens = self.sequences[name]
        for index, block in enumerate(self.kv.table(name)[: len(tokens) // self.size]):
            self.bad.discard(tuple(tokens[: (index + 1) * self.size]))  # right, even if earlier ones were wrong
            self.device_holds[block] = tuple(tokens[: (index + 1) * self.size])
        self.kv.register(name, tokens, len(tokens), len(tokens))

    def some(self) -> str | None:
        return self.rng.choice(list(self.sequences)) if self.sequences else None

    def extend(self) -> None:
        name = self.some()
        if name is not None:
            self.sequences[name] += [self.rng.randrange(2) for _ in range(self.rng.randrange(1, self.size + 1))]
            if self.grow(name, len(self.sequences[name])):
                self.compute(name)
            else:
                self.end(name)

    def end(self, name: str | None = None) -> None:
        name = name or self.some()
        if name is not None:
            self.kv.close(name)
            del self.sequences[name]

    def preempt(self) -> None:
        """Preempt a sequence: its blocks are being stored when it releases them."""
        name = self.some()
        if name is not None:
            self.begin_stores(self.kv.table(name))
            self.end(name)

    def store(self) -> None:
        name = self.some()
        if name is not None:
            self.begin_stores(self.kv.table(name)[: self.rng.randrange(1, 5)])

    def rescue(self) -> None:
        """Store blocks that no sequence holds."""
        free = self.kv.num_free
        copies = self.host.store_next_evicted(self.rng.randrange(1, 12), self.rng.randrange(4))
        assert self.kv.num_free == free - len(copies)
        for copy in copies:
            self.stores.append(copy)
            self.host_holds[copy.host] = None

    def begin_stores(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            wanted = self.host.should_store(block)
            copy = self.host.begin_store(block)
            assert copy is None or wanted
            if copy is not None:
                self.stores.append(copy)
                self.host_holds[copy.host] = None

    def finish_stores(self) -> None:
        done = self.stores[: self.rng.randrange(0, 6)]
        for copy in done:
            self.host_holds[copy.host] = self.device_holds[copy.block]
        self.host.finish_stores(done)
        del self.stores[: len(done)]

    def finish_load(self) -> None:
        """Complete a load: its blocks are free and can be matched."""
        if self.orphans and self.rng.random() < 0.5:
            self.copy(self.orphans.pop())
        elif self.loading:
            name = self.rng.choice(list(self.loading))
            self.copy(self.loading.pop(name))
            self.kv.close(name)

    def copy(self, copies: list[HostCopy]) -> None:
        for copy in copies:
            self.device_holds[copy.block] = self.host_holds[copy.host]
        self.host.finish_loads(copies)

    def drop_load(self) -> None:
        if self.loading:
            name = self.rng.choice(list(self.loading))
            self.host.cancel_loads(self.loading.pop(name))
            self.kv.close(name)

    def end_loading(self) -> None:
        if self.loading:
            name = self.rng.choice(list(self.loading))
            self.kv.close(name)
            self.orphans.append(self.loading.pop(name))

    def fail(self) -> None:
        """Invalidate the blocks of a sequence that the index says it computed."""
        name = self.some()
        if name is not None and self.rng.random() < 0.3:
            for block in self.kv.table(name):
                held = self.device_holds[block]
                if self.kv.index.full_entry(block) is not None and held is not None:
                    self.bad.add(held)
            self.kv.invalidate(name)
            self.end(name)


@examples(150, derandomize=True)
@given(st.integers(0, 10**9), st.integers(4, 24), st.integers(1, 24), st.sampled_from([1, 2, 4]))
def test_random_operations_keep_the_books(seed: int, num_blocks: int, num_host: int, block_size: int) -> None:
    driver = Driver(random.Random(seed), num_blocks, num_host, block_size)
    for _ in range(100):
        driver.act()
    for copies in (*driver.orphans, *driver.loading.values()):
        driver.copy(copies)
    while driver.stores:
        driver.finish_stores()
    for name in (*driver.sequences, *driver.loading, *driver.waiting):
        driver.kv.close(name)
    driver.kv.check_integrity()
    assert driver.kv.num_free == num_blocks


def test_the_random_operations_do_load() -> None:
    driver = Driver(random.Random(1), 10, 16, 2)
    for _ in range(600):
        driver.act()
    assert driver.loads > 10
