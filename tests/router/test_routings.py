"""The ways of choosing that need no promise: in turn, by load, by the beginning of the prompt."""

from collections import Counter
from random import Random

import pytest

from roseinfer.router.base import Ask
from roseinfer.router.placer import Placer
from roseinfer.router.registry import KEYED, ROUTERS, make_routing
from tests.router.promises import promise


def test_all_have_names() -> None:
    assert ROUTERS == ("pace", "least", "round-robin", "prefix-hash")
    assert set(ROUTERS) >= KEYED
    with pytest.raises(KeyError):
        make_routing("none", Random(0))


def test_in_turn() -> None:
    placer = Placer("round-robin", range(3), seed=1)
    engines = [placement.engine for _ in range(9) if (placement := placer.place(Ask(10), 0.0))]
    assert engines[:3] != engines[3:6][::-1] and sorted(engines[:3]) == [0, 1, 2] and engines[:3] * 3 == engines
    placer.set_up(1, False)
    assert sorted(p.engine for _ in range(4) if (p := placer.place(Ask(10), 0.0))) == [0, 0, 2, 2]


def test_processes_begin_their_turns_anywhere() -> None:
    starts = {p.engine for seed in range(50) if (p := Placer("round-robin", range(4), seed=seed).place(Ask(10), 0.0))}
    assert starts == {0, 1, 2, 3}


def test_by_load_those_that_wait_count_four_times() -> None:
    placer = Placer("least", range(3), seed=1)
    for engine, waiting, running in ((0, 2, 0), (1, 0, 7), (2, 1, 4)):
        placer.update(engine, promise(waiting=waiting, running=running))
    chosen = [p.engine for _ in range(3) if (p := placer.place(Ask(10), 10.0))]
    assert chosen[0] == 1 and sorted(chosen[1:]) == [0, 2], "7, then 8 and 8 with what was sent"


def test_by_load_the_same_at_random() -> None:
    counts = Counter(p.engine for seed in range(200) if (p := Placer("least", range(4), seed=seed).place(Ask(10), 0.0)))
    assert len(counts) == 4 and min(counts.values()) > 20


def test_by_prefix_the_beginning_says_where() -> None:
    placer, rng = Placer("prefix-hash", range(4), seed=1), Random(3)
    prefixes = [[rng.getrandbits(64) for _ in range(64)] for _ in range(200)]
    homes = {}
    for number, prefix in enumerate(prefixes):
        placed = {
            p.engine
            for _ in range(3)
            if (p := placer.place(Ask(1100, [*prefix, rng.getrandbits(64), rng.getrandbits(64)]), 0.0))
        }
        assert len(placed) == 1, "whatever comes behind it"
        homes[number] = placed.pop()
    assert min(Counter(homes.values()).values()) > 30
    placer.set_up(2, False)
    for number, prefix in enumerate(prefixes):
        found = placer.place(Ask(1100, prefix), 0.0)
        assert found is not None and found.engine != 2
        assert homes[number] == 2 or found.engine == homes[number], "only what was there moves"


def test_by_prefix_a_short_prompt_is_a_prefix_and_less_than_a_block_is_none() -> None:
    placer = Placer("prefix-hash", range(4), seed=1)
    assert len({p.engine for _ in range(20) if (p := placer.place(Ask(40, [5, 6]), 0.0))}) == 1
    assert len({p.engine for _ in range(60) if (p := placer.place(Ask(10), 0.0))}) == 4
