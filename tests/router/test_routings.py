"""Routing policies without promises: round-robin, least and prefix-hash."""

from collections import Counter
from random import Random

import pytest

from roseinfer.router.base import RoutingRequest
from roseinfer.router.placer import Placer
from roseinfer.router.registry import PREFIX_AWARE, ROUTERS, make_routing_policy
from tests.router.promises import promise


def test_all_have_names() -> None:
    assert ROUTERS == ("pace", "least", "round-robin", "prefix-hash")
    assert set(ROUTERS) >= PREFIX_AWARE
    with pytest.raises(KeyError):
        make_routing_policy("none", Random(0))


def test_round_robin() -> None:
    placer = Placer("round-robin", range(3), seed=1)
    engines = [placement.engine for _ in range(9) if (placement := placer.place(RoutingRequest(10), 0.0))]
    assert engines[:3] != engines[3:6][::-1] and sorted(engines[:3]) == [0, 1, 2] and engines[:3] * 3 == engines
    placer.set_available(1, False)
    assert sorted(p.engine for _ in range(4) if (p := placer.place(RoutingRequest(10), 0.0))) == [0, 0, 2, 2]


def test_round_robin_starts_at_a_random_engine() -> None:
    starts = {
        p.engine
        for seed in range(50)
        if (p := Placer("round-robin", range(4), seed=seed).place(RoutingRequest(10), 0.0))
    }
    assert starts == {0, 1, 2, 3}


def test_waiting_requests_count_four_times() -> None:
    placer = Placer("least", range(3), seed=1)
    for engine, waiting, running in ((0, 2, 0), (1, 0, 7), (2, 1, 4)):
        placer.update(engine, promise(waiting=waiting, running=running))
    chosen = [p.engine for _ in range(3) if (p := placer.place(RoutingRequest(10), 10.0))]
    assert chosen[0] == 1 and sorted(chosen[1:]) == [0, 2], "7, then 8 and 8 with what was sent"


def test_equal_loads_are_chosen_at_random() -> None:
    counts = Counter(
        p.engine for seed in range(200) if (p := Placer("least", range(4), seed=seed).place(RoutingRequest(10), 0.0))
    )
    assert len(counts) == 4 and min(counts.values()) > 20


def test_the_prefix_determines_the_engine() -> None:
    placer, rng = Placer("prefix-hash", range(4), seed=1), Random(3)
    prefixes = [[rng.getrandbits(64) for _ in range(64)] for _ in range(200)]
    homes = {}
    for number, prefix in enumerate(prefixes):
        placed = {
            p.engine
            for _ in range(3)
            if (p := placer.place(RoutingRequest(1100, [*prefix, rng.getrandbits(64), rng.getrandbits(64)]), 0.0))
        }
        assert len(placed) == 1, "whatever comes behind it"
        homes[number] = placed.pop()
    assert min(Counter(homes.values()).values()) > 30
    placer.set_available(2, False)
    for number, prefix in enumerate(prefixes):
        found = placer.place(RoutingRequest(1100, prefix), 0.0)
        assert found is not None and found.engine != 2
        assert homes[number] == 2 or found.engine == homes[number], "only what was there moves"


def test_a_short_prompt_is_hashed_if_it_has_a_full_block() -> None:
    placer = Placer("prefix-hash", range(4), seed=1)
    assert len({p.engine for _ in range(20) if (p := placer.place(RoutingRequest(40, [5, 6]), 0.0))}) == 1
    assert len({p.engine for _ in range(60) if (p := placer.place(RoutingRequest(10), 0.0))}) == 4


def test_short_prompts_are_hashed_by_their_adapter() -> None:
    placer, engines = Placer("prefix-hash", range(4), seed=1), set()
    for adapter in (-(2**63), -1, 1, 2, 3, 2**63 - 1, *range(10**18, 10**18 + 20)):
        found = {p.engine for _ in range(5) if (p := placer.place(RoutingRequest(10, adapter=adapter), 0.0))}
        assert len(found) == 1
        engines |= found
    assert len(engines) == 4
