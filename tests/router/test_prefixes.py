"""Model of an engine's prefix cache."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.router.prefixes import GENERATIONS_COUNT, CachedPrefixes


def chain(name: int, blocks: int, *, common: int = 0) -> list[int]:
    """Return the keys of a prompt that begins with `common` shared blocks."""
    own = 10_000 * (name + 1) + 100 * common  # a key stands for all that comes before it
    return [*range(common), *(own + block for block in range(common, blocks))]


def test_the_longest_cached_prefix() -> None:
    index = CachedPrefixes(1000)
    index.use(chain(0, 20, common=7))
    for blocks in range(1, 30):
        assert index.cached_blocks(chain(0, blocks, common=min(7, blocks))) == min(20, blocks)
        assert index.cached_blocks(chain(1, blocks, common=min(7, blocks))) == min(7, blocks)
    assert index.cached_blocks(chain(1, 9)) == 0 and index.cached_blocks([]) == 0


def test_the_least_recently_used_is_evicted_first() -> None:
    index = CachedPrefixes(100)
    for name in range(30):
        index.use(chain(name, 10))
        index.use(chain(0, 10))
    assert index.cached_blocks(chain(0, 10)) == 10, "used all the time"
    held = [index.cached_blocks(chain(name, 10)) for name in range(1, 30)]
    assert held == sorted(held) and held[-5:] == [10] * 5 and held[0] == 0


def test_it_has_no_more_blocks_than_the_engine() -> None:
    index, rng = CachedPrefixes(200), random.Random(1)
    for _ in range(500):
        index.use(chain(rng.randrange(100), rng.randint(1, 40)))
        assert len(index) <= 200 + 40
    assert len(index) > 200 * (1 - 2 / GENERATIONS_COUNT)


def test_other_blocks_evict_prefixes() -> None:
    """Other blocks: outputs, and requests of other processes."""
    index = CachedPrefixes(100)
    index.use(chain(0, 10))
    for name in range(1, 4):
        index.use(chain(name, 2), 50.0)
    assert index.cached_blocks(chain(0, 10)) == 0 and index.cached_blocks(chain(3, 2)) == 2


def test_blocks_that_were_cached_are_uncounted() -> None:
    index, other = CachedPrefixes(100), CachedPrefixes(100)
    for name in range(40):
        for one in (index, other):
            one.use(chain(name, 2), 8.0)
        index.add_other_blocks(-8.0)
        other.add_other_blocks(4.0)
    assert sum([index.cached_blocks(chain(name, 2)) for name in range(40)]) > 60
    assert sum([other.cached_blocks(chain(name, 2)) for name in range(40)]) < 20


def test_blocks_that_were_never_computed_are_removed() -> None:
    index = CachedPrefixes(100)
    index.use(chain(0, 10, common=4))
    index.use(chain(1, 10, common=4))
    index.remove(chain(1, 10, common=4)[4:])
    assert index.cached_blocks(chain(1, 10, common=4)) == 4 and index.cached_blocks(chain(0, 10, common=4)) == 10


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 12)), max_size=60))
def test_a_chain_is_cached_from_its_start(used: list[tuple[int, int, int]]) -> None:
    """Bisection needs it: if a block is present, so are all blocks before it."""
    index = CachedPrefixes(120)
    for name, blocks, common in used:
        index.use(chain(name, blocks, common=min(blocks, common)))
        for other, length, shared in used:
            keys = chain(other, length, common=min(length, shared))
            there = [index.cached_blocks([key]) == 1 for key in keys]
            assert there == sorted(there, reverse=True)
            assert index.cached_blocks(keys) == sum(there)
    assert index.used_blocks <= 120 + 30
