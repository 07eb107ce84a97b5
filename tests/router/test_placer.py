"""Placement of requests on engines."""

from collections import Counter
from collections.abc import Sequence
from math import inf
from random import Random

import pytest

from roseinfer.core.step_cost import StepCost
from roseinfer.router.base import Placement, RoutingRequest
from roseinfer.router.breaker import MAX_FAULTS_COUNT, MIN_OPEN_S, AttemptOutcome
from roseinfer.router.placer import Placer
from roseinfer.router.registry import ROUTERS
from tests.router.promises import COST, promise

ASK = RoutingRequest(100, output_tokens=200, ttft_left_s=1.0, tpot_s=0.05)
CLASSES = ((0.5, 0.03), (2.0, 0.03), (3.0, 0.03), (0.5, 0.05), (1.0, 0.05), (7.5, 0.05))


def placer_of(*shares: float, routing: str = "pace", **options: int) -> Placer:
    """Return a placer of engines with these utilisations."""
    placer = Placer(routing, range(len(shares)), seed=1, **options)
    for engine, share in enumerate(shares):
        placer.update(engine, promise(smallest_s=0.05, busy=share))
    return placer


def placed(placer: Placer, ask: RoutingRequest = ASK, now_s: float = 10.0, excluded: Sequence[int] = ()) -> Placement:
    found = placer.place(ask, now_s, excluded)
    assert found is not None
    return found


@pytest.mark.parametrize("routing", ROUTERS)
def test_engines_that_are_down_draining_or_excluded_get_nothing(routing: str) -> None:
    placer = placer_of(0.1, 0.1, 0.1, 0.1, routing=routing)
    placer.set_available(0, False)
    placer.update(1, promise(draining=True))
    assert {placed(placer, excluded=(2,)).engine for _ in range(10)} == {3}
    assert {placed(placer).engine for _ in range(40)} <= {2, 3}
    placer.set_available(0, True)
    placer.update(1, promise(20.0))
    assert {placed(placer, RoutingRequest(10), 20.0).engine for _ in range(60)} >= {0, 1} or routing == "pace"


@pytest.mark.parametrize("routing", ROUTERS)
def test_no_engine_accepts_requests(routing: str) -> None:
    placer = placer_of(0.1, 0.1, routing=routing)
    placer.update(0, promise(draining=True))
    assert placer.place(ASK, 10.0, excluded=(1,)) is None
    placer.set_available(1, False)
    assert placer.place(ASK, 10.0) is None and placer.place_retry(ASK, 10.0) is None
    assert placer.best_ttft_s(ASK, 10.0) == inf and not placer.attainable_when_idle(ASK)


def test_placements_have_numbers_and_reasons() -> None:
    placer = placer_of(0.9, 0.1)
    first, second = placed(placer), placed(placer, excluded=(1,))
    assert (first.number, first.engine, first.reason, first.request) == (1, 1, "pace", ASK)
    assert (second.number, second.engine, second.reason) == (2, 0, "only")
    assert first.forecast.meets_objectives and first.forecast.utilisation == pytest.approx(0.1 + 0.2 + 0.006)


def test_a_placed_request_counts_at_once() -> None:
    """Otherwise all requests between two promises would go to one engine."""
    placer = placer_of(0.1, 0.1, 0.1, 0.1)
    counts = Counter(placed(placer).engine for _ in range(400))
    assert max(counts.values()) <= 1.1 * 100


# --- one retry --------------------------------------------------------------------------------------------------
def test_a_rejected_request_goes_to_an_engine_that_meets_its_objectives() -> None:
    placer = placer_of(0.1, 0.6, 0.4, 2.0)
    again = placer.place_retry(ASK._replace(ttft_left_s=0.3), 10.5, excluded=(0,))
    assert again is not None and again.engine == 2 and again.reason == "retry" and again.number == 1
    assert placer.forecast(2, ASK, 10.5).utilisation > again.forecast.utilisation, "it counts as sent"


def test_a_rejected_request_is_not_placed_if_no_engine_meets_its_objectives() -> None:
    placer = placer_of(0.1, 0.6, 0.4)
    assert placer.place_retry(ASK._replace(ttft_left_s=0.005), 10.5, excluded=(0,)) is None
    assert placer_of(0.1, 1.6).place_retry(ASK, 10.0, excluded=(0,)) is None
    silent = Placer("pace", range(2))
    silent.update(0, promise(cost=StepCost()))
    assert silent.place_retry(ASK, 10.0) is None, "nothing is promised where nothing is known"


def test_best_ttft_of_the_fleet() -> None:
    placer = placer_of(0.1, 0.1)
    placer.update(0, promise(fill_tokens=3000))
    assert placer.best_ttft_s(ASK, 10.0) == placer.forecast(1, ASK, 10.0).ttft_s < placer.forecast(0, ASK, 10.0).ttft_s
    placer.set_available(1, False)
    assert placer.best_ttft_s(ASK, 10.0) == placer.forecast(0, ASK, 10.0).ttft_s


def test_attainable_when_idle() -> None:
    placer = placer_of(3.0, 3.0)
    assert placer.attainable_when_idle(ASK)
    assert not placer.attainable_when_idle(ASK._replace(tpot_s=0.010)) and not placer.attainable_when_idle(
        ASK._replace(ttft_left_s=0.019)
    )
    placer.update(0, promise(cost=StepCost()))
    assert placer.attainable_when_idle(ASK), "the other engine publishes costs"
    placer.update(1, promise(cost=StepCost()))
    assert not placer.attainable_when_idle(ASK), "no engine publishes costs"


# --- failures ---------------------------------------------------------------------------------------------------
def test_an_engine_that_fails_gets_nothing_then_one_request_then_all() -> None:
    placer = placer_of(0.1, 0.5)
    for number in range(MAX_FAULTS_COUNT):
        placer.report(0, AttemptOutcome.FAULT, 10.0 + number)
    now_s = 10.0 + MAX_FAULTS_COUNT - 1
    assert placer.is_breaker_open(0) and not placer.is_breaker_open(1)
    assert {placed(placer, ASK, now_s + 0.1).engine for _ in range(5)} == {1}
    now_s += MIN_OPEN_S
    assert [placed(placer, ASK, now_s).engine for _ in range(5)] == [0, 1, 1, 1, 1]
    placer.report(0, AttemptOutcome.ANSWERED, now_s + 0.1)
    assert not placer.is_breaker_open(0) and placed(placer, ASK, now_s + 0.1).engine == 0


def test_rejections_open_no_breaker() -> None:
    placer = placer_of(0.1, 0.5)
    for number in range(100):
        placer.report(0, AttemptOutcome.NEUTRAL, 10.0 + number)
    assert placed(placer).engine == 0


def test_a_restarted_engine_starts_with_no_history() -> None:
    placer = placer_of(0.1, 0.1)
    for number in range(MAX_FAULTS_COUNT):
        placer.report(0, AttemptOutcome.FAULT, 10.0 + number)
    placed(placer, RoutingRequest(1024, range(64)), excluded=(1,)) if not placer.is_breaker_open(0) else None
    placer.reset(0)
    assert not placer.is_breaker_open(0)
    assert placer.forecast(0, ASK, 10.0).utilisation == 0.0


# --- prefixes ---------------------------------------------------------------------------------------------------
def test_a_placed_prefix_counts_as_cached_until_it_ends_unprefilled() -> None:
    placer, keys = placer_of(0.1, 0.1, 0.1), [Random(2).getrandbits(64) for _ in range(60)]
    ask = ASK._replace(prompt_tokens=970, keys=keys)
    first = placed(placer, ask)
    second = placed(placer, ask)
    assert second.engine == first.engine and second.forecast.cached_tokens == 960
    placer.on_unprefilled(second)
    assert placer.forecast(first.engine, ask, 10.0).cached_tokens == 960, "the first one's"
    placer.on_unprefilled(first)
    assert placer.forecast(first.engine, ask, 10.0).cached_tokens == 0


def test_cached_prompts_take_no_further_blocks() -> None:
    """Case: of 20 prompts with 10 blocks, the engine had nine blocks that this process did not know of."""
    rng = Random(2)
    chains = [[rng.getrandbits(64) for _ in range(10)] for _ in range(20)]
    for cached, kept in ((0, 0), (144, 160)):
        placer = Placer("pace", range(2), seed=1, blocks=200, share=4)
        for keys in chains:
            placer.on_first_token(placed(placer, RoutingRequest(160, keys), excluded=(1,)), cached)
        assert placer.forecast(0, RoutingRequest(160, chains[8]), 0.0).cached_tokens == kept


# --- engines that come and go ----------------------------------------------------------------------------------
def test_an_added_engine_is_new_and_a_removed_one_is_forgotten() -> None:
    placer = placer_of(0.1, 0.1)
    keys = list(range(20))
    lost = placed(placer, RoutingRequest(320, keys), excluded=(1,))
    placer.add(7)
    assert {placed(placer, excluded=(0, 1)).engine} == {7}
    placer.remove(0)
    assert {placed(placer, excluded=(7,)).engine for _ in range(8)} == {1}
    placer.on_first_token(lost, 0)  # what is still heard of it changes nothing
    placer.on_unprefilled(lost)
    placer.report(0, AttemptOutcome.FAULT, 10.0)
    placer.add(0)
    assert placer.forecast(0, RoutingRequest(320, keys), 10.0).cached_tokens == 0
    placer.remove(0)
    placer.remove(1)
    placer.remove(7)
    assert placer.place(ASK, 10.0) is None and placer.place_retry(ASK, 10.0) is None


# --- many at once -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("routing", "engines"), [("pace", 4), ("least", 4), ("least", 8), ("round-robin", 8)])
def test_a_burst_on_stale_promises_is_spread(routing: str, engines: int) -> None:
    """500 requests of six classes reach 4 processes before any engine publishes again."""
    rng = Random(4)
    cost = StepCost(17.5e-3, 85e-6, 70e-6, 0.16e-6)
    fleet = [Placer(routing, range(engines), share=4, seed=seed) for seed in range(4)]
    for placer in fleet:
        for engine in range(engines):
            placer.update(engine, promise(10.0, cost=cost, output_tokens=300.0))
    counts: Counter[int] = Counter()
    for number in range(500):
        ttft_s, tpot_s = rng.choice(CLASSES)
        prompt = min(1024, max(4, round(rng.lognormvariate(4.25, 1.35))))
        found = fleet[number % 4].place(RoutingRequest(prompt, ttft_left_s=ttft_s, tpot_s=tpot_s), 10.0 + number * 2e-5)
        assert found is not None
        counts[found.engine] += 1
    assert max(counts.values()) <= 1.3 * 500 / engines, counts


def test_costs_are_those_of_hand_made_promises() -> None:
    assert promise().cost == COST
