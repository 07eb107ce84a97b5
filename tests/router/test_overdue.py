"""Requests that leave a full engine because they wait too long, and the engines that get them."""

from collections.abc import Sequence

from roseinfer.core.promise import Promise
from roseinfer.router.base import RoutingRequest
from roseinfer.router.overdue import MAX_MOVES_COUNT, MIN_WAIT_S, Unanswered, overdue_moves
from roseinfer.router.placer import Placer
from tests.router.promises import promise

NOW_S, FULL, OTHER = 10.0, 0, 1
# Of 8 seats none is free, and 4 requests wait.
BUSY = promise(NOW_S, running=8, waiting=4, best_effort=4, free_seats=0)
SHORT = RoutingRequest(20)


def moves(
    other: Promise | None,
    request: RoutingRequest = SHORT,
    ages_s: Sequence[float] = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0),
    samples: int = 1,
    busy: Promise = BUSY,
    share: int = 1,
) -> list[tuple[float, int]]:
    """Return (age, engine) of the requests that leave the full engine, in their order."""
    placer = Placer("pace", (FULL, OTHER), seed=1, share=share)
    placer.update(FULL, busy)
    if other is not None:
        placer.update(OTHER, other)
    sent = [Unanswered(age_s, NOW_S - age_s, samples, True) for age_s in ages_s]
    found = overdue_moves(placer, FULL, lambda: sent, lambda age_s: request, NOW_S)
    return [(age_s, placement.engine) for age_s, placement in found]


def test_the_newest_requests_wait_and_the_oldest_of_these_goes_first() -> None:
    """An idle engine of 8 seats takes as many as leave it a reserve."""
    assert moves(promise(NOW_S, free_seats=8)) == [(7.0, OTHER), (6.0, OTHER), (5.0, OTHER), (4.0, OTHER)]
    assert moves(promise(NOW_S, running=5, waiting=2, free_seats=3)) == [], "its seats are taken, as far as it says"
    assert moves(promise(NOW_S, free_seats=8), samples=2) == [(5.0, OTHER), (4.0, OTHER)], "each waits twice"
    assert moves(promise(NOW_S, free_seats=30), share=2) == [(5.0, OTHER), (4.0, OTHER)], (
        "another process sent the rest"
    )


def test_a_young_request_stays() -> None:
    idle = promise(NOW_S, free_seats=8)
    assert moves(idle, ages_s=[0.5 * MIN_WAIT_S] * 6) == []
    assert moves(idle, busy=BUSY._replace(waiting=0)) == [], "none waits"


def test_an_engine_without_a_promise_or_that_drains_gets_none() -> None:
    assert moves(None) == moves(promise(NOW_S, free_seats=8, draining=True)) == []


def test_requests_also_go_to_a_queue_of_less_than_half_the_length() -> None:
    def to_queue(length: int) -> int:
        return len(moves(promise(NOW_S, running=8, waiting=length, best_effort=length, free_seats=0)))

    assert [to_queue(length) for length in (0, 1, 2, 3)] == [2, 1, 0, 0]


def test_a_prompt_that_takes_longer_than_the_wait_so_far_stays() -> None:
    """80,000 tokens of .1 ms take 8 s; the prefix may be in the cache of the present engine."""
    idle = promise(NOW_S, free_seats=30)
    assert [age_s for age_s, _ in moves(idle, RoutingRequest(80_000), ages_s=(9.5, 9.0, 8.5, 7.0))] == [9.5]


def test_a_call_moves_a_bounded_number() -> None:
    busy = BUSY._replace(waiting=200, best_effort=200)
    found = moves(promise(NOW_S, free_seats=1000), ages_s=[10.0 - 0.01 * number for number in range(200)], busy=busy)
    assert len(found) == MAX_MOVES_COUNT and found[0][0] == 10.0
