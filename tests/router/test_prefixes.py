"""The index of what an engine's prefix cache may hold."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.router.prefixes import GENERATIONS, HeldPrefixes


def chain(name: int, blocks: int, *, common: int = 0) -> list[int]:
    """Keys of a prompt that begins with `common` blocks that all have."""
    own = 10_000 * (name + 1) + 100 * common  # a key stands for all that comes before it
    return [*range(common), *(own + block for block in range(common, blocks))]


def test_the_longest_part_that_is_there() -> None:
    index = HeldPrefixes(1000)
    index.use(chain(0, 20, common=7))
    for blocks in range(1, 30):
        assert index.held(chain(0, blocks, common=min(7, blocks))) == min(20, blocks)
        assert index.held(chain(1, blocks, common=min(7, blocks))) == min(7, blocks)
    assert index.held(chain(1, 9)) == 0 and index.held([]) == 0


def test_the_least_lately_used_goes_first() -> None:
    index = HeldPrefixes(100)
    for name in range(30):
        index.use(chain(name, 10))
        index.use(chain(0, 10))
    assert index.held(chain(0, 10)) == 10, "used all the time"
    held = [index.held(chain(name, 10)) for name in range(1, 30)]
    assert held == sorted(held) and held[-5:] == [10] * 5 and held[0] == 0


def test_it_holds_no_more_than_the_engine() -> None:
    index, rng = HeldPrefixes(200), random.Random(1)
    for _ in range(500):
        index.use(chain(rng.randrange(100), rng.randint(1, 40)))
        assert len(index) <= 200 + 40
    assert len(index) > 200 * (1 - 2 / GENERATIONS)


def test_blocks_of_something_else_push_prefixes_out() -> None:
    """Outputs, and what others send there."""
    index = HeldPrefixes(100)
    index.use(chain(0, 10))
    for name in range(1, 4):
        index.use(chain(name, 2), 50.0)
    assert index.held(chain(0, 10)) == 0 and index.held(chain(3, 2)) == 2


def test_what_was_counted_and_proved_to_be_there_is_taken_back() -> None:
    index, other = HeldPrefixes(100), HeldPrefixes(100)
    for name in range(40):
        for one in (index, other):
            one.use(chain(name, 2), 8.0)
        index.taken(-8.0)
        other.taken(4.0)
    assert sum([index.held(chain(name, 2)) for name in range(40)]) > 60
    assert sum([other.held(chain(name, 2)) for name in range(40)]) < 20


def test_what_never_came_there_is_dropped() -> None:
    index = HeldPrefixes(100)
    index.use(chain(0, 10, common=4))
    index.use(chain(1, 10, common=4))
    index.drop(chain(1, 10, common=4)[4:])
    assert index.held(chain(1, 10, common=4)) == 4 and index.held(chain(0, 10, common=4)) == 10


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 12)), max_size=60))
def test_a_chain_is_held_from_its_beginning(used: list[tuple[int, int, int]]) -> None:
    """If a block is there, so are those before it, however much came and went: bisection finds the last."""
    index = HeldPrefixes(120)
    for name, blocks, common in used:
        index.use(chain(name, blocks, common=min(blocks, common)))
        for other, length, shared in used:
            keys = chain(other, length, common=min(length, shared))
            there = [any(key in generation for generation in index._generations) for key in keys]
            assert there == sorted(there, reverse=True)
            assert index.held(keys) == sum(there)
    assert index.used <= 120 + 30
