"""Routing policy "pace", on hand-made promises."""

from collections import Counter
from random import Random

import pytest

from roseinfer.core.promise import Promise
from roseinfer.core.step_cost import StepCost
from roseinfer.router.base import Placement, RoutingRequest
from roseinfer.router.placer import Placer
from tests.router.promises import COST, promise, with_adapters

TIGHT = RoutingRequest(100, output_tokens=200, ttft_left_s=1.0, tpot_s=0.02)
LOOSE = TIGHT._replace(tpot_s=0.05)
PATIENT = TIGHT._replace(tpot_s=0.2)
PREFIX = [Random(5).getrandbits(64) for _ in range(64)]


def place(
    ask: RoutingRequest, *promises: Promise, seed: int = 0, holders: tuple[int, ...] = (), now_s: float = 10.0
) -> Placement:
    """Place one request. `holders` have cached its prefix."""
    placer = Placer("pace", range(len(promises)), seed=seed)
    for engine in holders:
        others = [other for other in range(len(promises)) if other != engine]
        assert placer.place(RoutingRequest(1024, PREFIX), 0.0, others) is not None
    for engine, published in enumerate(promises):
        placer.update(engine, published)
    found = placer.place(ask, now_s)
    assert found is not None
    return found


def busy(smallest_s: float, share: float, **fields: float) -> Promise:
    return promise(smallest_s=smallest_s, busy=share, **fields)


# --- pace -------------------------------------------------------------------------------------------------------
def test_a_tight_request_goes_to_an_engine_with_a_tight_pace() -> None:
    """On the loose engine, steps would cost all other requests .3 more of the engine's time."""
    assert place(TIGHT, busy(0.05, 0.2), busy(0.02, 0.3)).engine == 1
    assert place(TIGHT, busy(0.02, 0.3), busy(0.05, 0.2)).engine == 0


def test_a_loose_request_avoids_a_tight_pace() -> None:
    assert place(LOOSE, busy(0.02, 0.2), busy(0.05, 0.2)).engine == 1


def test_a_full_engine_overflows_to_the_other() -> None:
    """Tight and loose requests leave their engine once it is full."""
    assert place(TIGHT, busy(0.02, 0.52), busy(0.05, 0.1)).engine == 1
    assert place(LOOSE, busy(0.02, 0.1), busy(0.05, 0.82)).engine == 0


def test_requests_without_objectives_pay_for_no_pace() -> None:
    """A pace costs an engine without objectives nothing more, so a busy engine of the same pace is left in time."""
    assert place(TIGHT, promise(), busy(0.02, 0.2)).engine == 0
    assert place(TIGHT, busy(0.05, 0.1), promise(busy=0.1)).engine == 1
    assert place(TIGHT, promise(busy=0.1), busy(0.02, 0.05)).engine == 1


def test_in_a_full_fleet_tight_paces_stay_together() -> None:
    """A tight request goes to another engine only if the fleet has spare capacity."""
    assert place(TIGHT, busy(0.02, 0.37), busy(0.05, 0.2)).engine == 1
    assert place(TIGHT, busy(0.02, 0.37), busy(0.05, 0.5)).engine == 0


def test_an_engine_that_meets_the_objectives_comes_first() -> None:
    late = busy(0.02, 0.1, fill_tokens=9000)
    assert place(TIGHT, late, busy(0.05, 0.4)).engine == 1


def test_if_none_meets_the_objectives_the_least_late_engine() -> None:
    """The request is placed in any case, since estimates err."""
    queues = [busy(0.02, 0.3, fill_tokens=tokens) for tokens in (9000, 7000, 8000)]
    found = place(TIGHT, *queues)
    assert found.engine == 1 and not found.forecast.meets_objectives and found.forecast.late_s > 0
    assert place(TIGHT, *[busy(0.02, share) for share in (1.5, 1.7, 1.4)]).engine == 2


def test_lateness_and_overload_are_added() -> None:
    slightly_late, far_too_full = busy(0.02, 0.3, fill_tokens=2000), busy(0.02, 2.0)
    assert place(TIGHT, slightly_late, far_too_full).engine == 0


def test_a_slower_engine_is_chosen_less() -> None:
    """Each engine is judged by its own costs: a request that fits the fast one does not fit here."""
    slow = StepCost(*[1.5 * seconds for seconds in COST])
    ask = TIGHT._replace(tpot_s=0.03)
    assert place(ask, promise(cost=slow), promise()).engine == 1
    counts = Counter()
    placer = Placer("pace", range(2), seed=1)
    placer.update(0, promise(cost=slow))
    placer.update(1, promise())
    for _ in range(60):
        found = placer.place(ask, 10.0)
        assert found is not None
        counts[found.engine] += 1
    assert counts[1] > counts[0]


def test_ties_are_broken_at_random() -> None:
    """Processes with the same view must not all choose the same engine."""
    counts = Counter(place(TIGHT, *[promise()] * 4, seed=seed).engine for seed in range(400))
    assert len(counts) == 4 and min(counts.values()) > 60


# --- requests without objectives --------------------------------------------------------------------------------
def test_best_effort_goes_where_the_fewest_best_effort_requests_wait() -> None:
    calm = RoutingRequest(100)
    assert place(calm, promise(best_effort=3), busy(0.02, 0.4, best_effort=1)).engine == 1
    assert place(calm, busy(0.02, 0.4), busy(0.02, 0.2)).engine == 1
    assert place(calm, promise(running=5), promise(running=2)).engine == 1, "all the same but for who runs there"


def test_best_effort_follows_its_prefix_unless_that_engine_is_far_busier() -> None:
    ask = RoutingRequest(1040, PREFIX)
    found = place(ask, promise(running=30, best_effort=2), promise(), holders=(0,))
    assert found.engine == 0 and found.reason == "prefix"
    found = place(ask, promise(running=60), promise(), holders=(0,))
    assert found.engine == 1 and found.reason == "rest"
    assert place(ask, promise(running=630), promise(running=590), holders=(0,)).engine == 0, "within a tenth"


# --- prefixes ---------------------------------------------------------------------------------------------------
HELD = RoutingRequest(1040, PREFIX, output_tokens=200, ttft_left_s=1.0, tpot_s=0.05)


def test_an_engine_with_the_prefix_comes_first() -> None:
    found = place(HELD, promise(), busy(0.02, 0.3), promise(), holders=(1,))
    assert found.engine == 1 and found.reason == "prefix"
    assert found.forecast.cached_tokens == 1024


def test_several_engines_with_the_prefix_are_compared_by_pace() -> None:
    assert place(HELD, busy(0.05, 0.6), promise(), busy(0.05, 0.3), holders=(0, 2)).engine == 2


def test_an_engine_with_the_prefix_that_is_late_is_left_for_one_in_time() -> None:
    found = place(HELD, busy(0.02, 0.45), busy(0.05, 0.1), holders=(0,))
    assert found.engine == 1 and found.reason == "promise"
    late = promise(fill_tokens=20_000)
    assert place(HELD, late, late, holders=(0,)).engine == 0, "neither meets them"


def test_a_full_fleet_computes_no_prefix_twice() -> None:
    found = place(HELD, busy(0.05, 1.5), busy(0.05, 0.5), busy(0.05, 0.9), holders=(0,))
    assert found.engine == 0 and found.reason == "prefix"


def test_a_short_prefix_does_not_matter() -> None:
    ask = RoutingRequest(1040, [*PREFIX[:4], *range(60)], ttft_left_s=1.0, tpot_s=0.05)
    assert place(ask, busy(0.05, 0.5), promise(smallest_s=0.05), holders=(0,)).engine == 1


def test_cached_tokens_count_in_every_forecast() -> None:
    ask = HELD._replace(keys=PREFIX[:4], prompt_tokens=64)
    assert place(ask, promise(), busy(0.02, 0.2), holders=(0,)).forecast.cached_tokens == 64


# --- engines that say little ------------------------------------------------------------------------------------
def test_engines_without_costs_are_chosen_by_load() -> None:
    found = place(TIGHT, *[promise(cost=StepCost(), running=running) for running in (5, 2, 7)])
    assert found.engine == 1 and found.reason == "load"


def test_an_engine_without_a_promise_is_not_preferred() -> None:
    placer = Placer("pace", range(3), seed=0)
    placer.update(1, busy(0.02, 0.9))
    found = placer.place(TIGHT, 10.0)
    assert found is not None and found.engine == 1


def test_no_prompt_is_too_short() -> None:
    assert place(RoutingRequest(0, ttft_left_s=1.0), promise(), promise()).forecast.ttft_s == pytest.approx(0.010)


# --- adapters ---------------------------------------------------------------------------------------------------
ADAPTED = HELD._replace(keys=(), adapter=5, adapter_bytes=10**8)


def with_adapter(smallest_s: float, share: float, *, here: bool, **fields: float) -> Promise:
    """Return the promise of a busy engine that has other adapters too."""
    return with_adapters((9, 5) if here else (9,), smallest_s=smallest_s, busy=share, **fields)


@pytest.mark.parametrize("ask", [ADAPTED, RoutingRequest(100, adapter=5, adapter_bytes=10**8)])
def test_an_engine_with_the_adapter_comes_first(ask: RoutingRequest) -> None:
    engines = [
        with_adapter(0.05, 0.1, here=False),
        with_adapter(0.02, 0.3, here=True),
        with_adapter(0.05, 0.1, here=False),
    ]
    found = place(ask, *engines)
    assert found.engine == 1 and found.reason == "adapter"
    assert place(ask._replace(adapter=0), *engines).engine != 1


def test_the_prefix_comes_before_the_adapter() -> None:
    """A prefix was computed with the adapter, which can be loaded meanwhile."""
    ask = HELD._replace(adapter=5, adapter_bytes=10**8)
    found = place(ask, with_adapter(0.05, 0.1, here=False), with_adapter(0.05, 0.1, here=True), holders=(0,))
    assert found.engine == 0 and found.reason == "prefix"


def test_an_engine_with_the_adapter_that_is_late_is_left_for_one_that_can_load_it_in_time() -> None:
    late, other = with_adapter(0.05, 0.1, here=True, fill_tokens=20_000), with_adapter(0.05, 0.2, here=False)
    found = place(ADAPTED, late, other)
    assert found.engine == 1 and found.reason == "promise"
    found = place(ADAPTED._replace(ttft_left_s=0.1), late, other)
    assert found.engine == 0, "loading takes .1 s, so neither is in time"


def test_best_effort_leaves_a_far_busier_engine_with_its_adapter() -> None:
    ask = RoutingRequest(100, adapter=5, adapter_bytes=10**8)
    found = place(ask, with_adapters((5,), running=60), with_adapters((9,)))
    assert found.engine == 1 and found.reason == "rest"


def test_a_burst_for_a_new_adapter_stays_on_one_engine() -> None:
    placer = Placer("pace", range(4), seed=0)
    for engine in range(4):
        placer.update(engine, with_adapters((9,)))
    found = [placer.place(ADAPTED, 10.0 + i / 1000) for i in range(5)]
    assert len({each.engine for each in found if each is not None}) == 1
    assert [each.reason for each in found if each is not None] == ["pace", *["adapter"] * 4]
