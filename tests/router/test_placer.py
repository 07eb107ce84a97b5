"""What a process that places requests knows of its engines."""

from collections import Counter
from collections.abc import Sequence
from math import inf
from random import Random

import pytest

from roseinfer.router.base import Ask, Placement
from roseinfer.router.breaker import FAULTS, OPEN_S, Outcome
from roseinfer.router.placer import Placer
from roseinfer.router.registry import ROUTERS
from tests.router.promises import COST, promise

ASK = Ask(100, output_tokens=200, ttft_left_s=1.0, tpot_s=0.05)
CLASSES = ((0.5, 0.03), (2.0, 0.03), (3.0, 0.03), (0.5, 0.05), (1.0, 0.05), (7.5, 0.05))


def placer_of(*shares: float, routing: str = "pace", **options: int) -> Placer:
    """Engines that are so full."""
    placer = Placer(routing, range(len(shares)), seed=1, **options)
    for engine, share in enumerate(shares):
        placer.update(engine, promise(smallest_s=0.05, busy=share))
    return placer


def placed(placer: Placer, ask: Ask = ASK, now_s: float = 10.0, but: Sequence[int] = ()) -> Placement:
    found = placer.place(ask, now_s, but)
    assert found is not None
    return found


@pytest.mark.parametrize("routing", ROUTERS)
def test_engines_that_are_down_draining_or_not_wanted_get_nothing(routing: str) -> None:
    placer = placer_of(0.1, 0.1, 0.1, 0.1, routing=routing)
    placer.set_up(0, False)
    placer.update(1, promise(draining=True))
    assert {placed(placer, but=(2,)).engine for _ in range(10)} == {3}
    assert {placed(placer).engine for _ in range(40)} <= {2, 3}
    placer.set_up(0, True)
    placer.update(1, promise(20.0))
    assert {placed(placer, Ask(10), 20.0).engine for _ in range(60)} >= {0, 1} or routing == "pace"


@pytest.mark.parametrize("routing", ROUTERS)
def test_nobody_takes_requests(routing: str) -> None:
    placer = placer_of(0.1, 0.1, routing=routing)
    placer.update(0, promise(draining=True))
    assert placer.place(ASK, 10.0, but=(1,)) is None
    placer.set_up(1, False)
    assert placer.place(ASK, 10.0) is None and placer.keeper(ASK, 10.0) is None
    assert placer.best_ttft_s(ASK, 10.0) == inf and not placer.idle_keeps(ASK)


def test_placements_have_numbers_and_say_why() -> None:
    placer = placer_of(0.9, 0.1)
    first, second = placed(placer), placed(placer, but=(1,))
    assert (first.number, first.engine, first.reason, first.ask) == (1, 1, "pace", ASK)
    assert (second.number, second.engine, second.reason) == (2, 0, "only")
    assert first.outlook.keeps and first.outlook.utilisation == pytest.approx(0.1 + 0.2 + 0.006)


def test_what_was_placed_counts_at_once() -> None:
    """Without it all that come between two promises would go to one engine."""
    placer = placer_of(0.1, 0.1, 0.1, 0.1)
    counts = Counter(placed(placer).engine for _ in range(400))
    assert max(counts.values()) <= 1.1 * 100


# --- one retry --------------------------------------------------------------------------------------------------
def test_a_refused_request_goes_where_a_promise_still_holds_it() -> None:
    placer = placer_of(0.1, 0.6, 0.4, 2.0)
    again = placer.keeper(ASK._replace(ttft_left_s=0.3), 10.5, but=(0,))
    assert again is not None and again.engine == 2 and again.reason == "retry" and again.number == 1
    assert placer.outlook(2, ASK, 10.5).utilisation > again.outlook.utilisation, "it counts as sent"


def test_a_refused_request_goes_nowhere_if_nobody_can_keep_it() -> None:
    placer = placer_of(0.1, 0.6, 0.4)
    assert placer.keeper(ASK._replace(ttft_left_s=0.005), 10.5, but=(0,)) is None
    assert placer_of(0.1, 1.6).keeper(ASK, 10.0, but=(0,)) is None
    silent = Placer("pace", range(2))
    silent.update(0, promise(cost_s=(0.0, 0.0, 0.0, 0.0)))
    assert silent.keeper(ASK, 10.0) is None, "nothing is promised where nothing is known"


def test_the_fleet_s_best_ttft() -> None:
    placer = placer_of(0.1, 0.1)
    placer.update(0, promise(fill_tokens=3000))
    assert placer.best_ttft_s(ASK, 10.0) == placer.outlook(1, ASK, 10.0).ttft_s < placer.outlook(0, ASK, 10.0).ttft_s
    placer.set_up(1, False)
    assert placer.best_ttft_s(ASK, 10.0) == placer.outlook(0, ASK, 10.0).ttft_s


def test_whether_an_idle_fleet_could_keep_it() -> None:
    placer = placer_of(3.0, 3.0)
    assert placer.idle_keeps(ASK)
    assert not placer.idle_keeps(ASK._replace(tpot_s=0.010)) and not placer.idle_keeps(ASK._replace(ttft_left_s=0.019))
    placer.update(0, promise(cost_s=(0.0, 0.0, 0.0, 0.0)))
    assert placer.idle_keeps(ASK), "the other one says so"
    placer.update(1, promise(cost_s=(0.0, 0.0, 0.0, 0.0)))
    assert not placer.idle_keeps(ASK), "nobody says so"


# --- failures ---------------------------------------------------------------------------------------------------
def test_an_engine_that_fails_gets_nothing_then_one_request_then_all() -> None:
    placer = placer_of(0.1, 0.5)
    for number in range(FAULTS):
        placer.report(0, Outcome.FAULT, 10.0 + number)
    now_s = 10.0 + FAULTS - 1
    assert placer.breaker_open(0) and not placer.breaker_open(1)
    assert {placed(placer, ASK, now_s + 0.1).engine for _ in range(5)} == {1}
    now_s += OPEN_S
    assert [placed(placer, ASK, now_s).engine for _ in range(5)] == [0, 1, 1, 1, 1]
    placer.report(0, Outcome.ANSWERED, now_s + 0.1)
    assert not placer.breaker_open(0) and placed(placer, ASK, now_s + 0.1).engine == 0


def test_refusals_open_no_breaker() -> None:
    placer = placer_of(0.1, 0.5)
    for number in range(100):
        placer.report(0, Outcome.NEUTRAL, 10.0 + number)
    assert placed(placer).engine == 0


def test_an_engine_that_was_started_anew_begins_with_nothing() -> None:
    placer = placer_of(0.1, 0.1)
    for number in range(FAULTS):
        placer.report(0, Outcome.FAULT, 10.0 + number)
    placed(placer, Ask(1024, range(64)), but=(1,)) if not placer.breaker_open(0) else None
    placer.forget(0)
    assert not placer.breaker_open(0)
    assert placer.outlook(0, ASK, 10.0).utilisation == 0.0


# --- prefixes ---------------------------------------------------------------------------------------------------
def test_what_was_placed_is_thought_to_be_there_until_it_ends_without_a_token() -> None:
    placer, keys = placer_of(0.1, 0.1, 0.1), [Random(2).getrandbits(64) for _ in range(60)]
    ask = ASK._replace(prompt_tokens=970, keys=keys)
    first = placed(placer, ask)
    second = placed(placer, ask)
    assert second.engine == first.engine and second.outlook.cached_tokens == 960
    placer.ended_unstarted(second)
    assert placer.outlook(first.engine, ask, 10.0).cached_tokens == 960, "the first one's"
    placer.ended_unstarted(first)
    assert placer.outlook(first.engine, ask, 10.0).cached_tokens == 0


def test_prompts_found_in_the_cache_take_no_room_there() -> None:
    """Of 20 prompts of 10 blocks each the engine held nine blocks, although this process did not know of them."""
    rng = Random(2)
    chains = [[rng.getrandbits(64) for _ in range(10)] for _ in range(20)]
    for cached, kept in ((0, 0), (144, 160)):
        placer = Placer("pace", range(2), seed=1, blocks=200, share=4)
        for keys in chains:
            placer.started(placed(placer, Ask(160, keys), but=(1,)), cached)
        assert placer.outlook(0, Ask(160, chains[8]), 0.0).cached_tokens == kept


# --- engines that come and go ----------------------------------------------------------------------------------
def test_an_engine_that_comes_is_new_and_one_that_goes_is_forgotten() -> None:
    placer = placer_of(0.1, 0.1)
    keys = list(range(20))
    lost = placed(placer, Ask(320, keys), but=(1,))
    placer.add(7)
    assert {placed(placer, but=(0, 1)).engine} == {7}
    placer.drop(0)
    assert {placed(placer, but=(7,)).engine for _ in range(8)} == {1}
    placer.started(lost, 0)  # what is still heard of it changes nothing
    placer.ended_unstarted(lost)
    placer.report(0, Outcome.FAULT, 10.0)
    placer.add(0)
    assert placer.outlook(0, Ask(320, keys), 10.0).cached_tokens == 0
    placer.drop(0)
    placer.drop(1)
    placer.drop(7)
    assert placer.place(ASK, 10.0) is None and placer.keeper(ASK, 10.0) is None


# --- many at once -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("routing", "engines"), [("pace", 4), ("least", 4), ("least", 8), ("round-robin", 8)])
def test_a_burst_on_stale_rows_is_spread(routing: str, engines: int) -> None:
    """500 requests of six classes come to 4 processes before any engine has published anew."""
    rng = Random(4)
    cost = (17.5e-3, 85e-6, 70e-6, 0.16e-6)
    fleet = [Placer(routing, range(engines), share=4, seed=seed) for seed in range(4)]
    for placer in fleet:
        for engine in range(engines):
            placer.update(engine, promise(10.0, cost_s=cost, output_tokens=300.0))
    counts: Counter[int] = Counter()
    for number in range(500):
        ttft_s, tpot_s = rng.choice(CLASSES)
        prompt = min(1024, max(4, round(rng.lognormvariate(4.25, 1.35))))
        found = fleet[number % 4].place(Ask(prompt, ttft_left_s=ttft_s, tpot_s=tpot_s), 10.0 + number * 2e-5)
        assert found is not None
        counts[found.engine] += 1
    assert max(counts.values()) <= 1.3 * 500 / engines, counts


def test_costs_are_those_of_hand_made_promises() -> None:
    assert promise().cost_s == COST
