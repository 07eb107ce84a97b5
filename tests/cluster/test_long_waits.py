"""Requests that wait for a full engine while another has room: placed again, once, with the same text."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from roseinfer.core.errors import EngineClosedError, InvalidRequestError, RoseinferError
from roseinfer.core.request import NO_META, RequestMeta
from roseinfer.core.slo import Slo
from roseinfer.engine.messages import Abort, ClientMessage
from roseinfer.router.overdue import MIN_WAIT_S
from tests.helpers.routed_fleet import Asked, Fleet, with_fleet


def grows(work: Callable[[Fleet], Awaitable[None]]) -> Callable[[], None]:
    """Begin with one engine; more can be added."""

    def test() -> None:
        asyncio.run(with_fleet(work, engines=1, dynamic=True))

    test.__doc__ = work.__doc__
    return test


async def full_engine_and_a_new_one(
    fleet: Fleet, requests: int = 5, n: int = 1, meta: RequestMeta = NO_META
) -> list[Asked]:
    """Let the first engine run two of the requests while the others wait, and start a second engine."""
    asked = [fleet.submit(n=n, meta=meta) for _ in range(requests)]
    fleet.clock.advance(MIN_WAIT_S)
    fleet.promise(0, running=2 * n, waiting=(requests - 2) * n)
    fleet.add()
    await fleet.reach(1)
    fleet.promise(1, free_seats=30)
    return asked


def finish_whole(fleet: Fleet, asked: list[Asked]) -> None:
    fleet.finish()
    for one in asked:
        one.check_whole()


@pytest.mark.parametrize("n", [1, 3])
def test_those_that_wait_go_to_a_new_engine_in_their_order(n: int) -> None:
    @grows
    async def check(fleet: Fleet) -> None:
        asked = await full_engine_and_a_new_one(fleet, n=n)
        fleet.routed.tick()
        assert [fleet.where(one) for one in asked] == [0, 0, 1, 1, 1]
        first, second = fleet.models
        assert [add.prompt.ids for add in second.adds] == [one.request.prompt.ids for one in asked[2:]]
        assert [add.age_s for add in second.adds] == pytest.approx([MIN_WAIT_S] * 3), "as old as since their arrival"
        aborted = [name for message in first.heard if isinstance(message, Abort) for name in message.sequence_ids]
        assert len(aborted) == 3 * n and len(first.samples) == 2 * n, "the first engine has forgotten them"
        assert fleet.observed.said[-3:] == [("placed again", 0, "queue")] * 3
        finish_whole(fleet, asked)

    check()


@grows
async def test_young_requests_and_begun_ones_stay(fleet: Fleet) -> None:
    asked = await full_engine_and_a_new_one(fleet)
    fleet.models[0].step()
    late = fleet.submit()
    while fleet.where(late) == 1:
        late = fleet.submit()
        asked.append(late)
    fleet.promise(0, running=2, waiting=5)
    fleet.promise(1, free_seats=30)
    fleet.routed.tick()
    assert fleet.where(late) == 0 and [fleet.where(one) for one in asked[:5]] == [0] * 5
    finish_whole(fleet, [*asked[:5], late])


@grows
async def test_requests_with_objectives_stay(fleet: Fleet) -> None:
    asked = await full_engine_and_a_new_one(fleet, meta=RequestMeta(slo=Slo(ttft_s=60.0)))
    fleet.routed.tick()
    assert [fleet.where(one) for one in asked] == [0] * 5
    finish_whole(fleet, asked)


@grows
async def test_a_request_moves_once(fleet: Fleet) -> None:
    asked = await full_engine_and_a_new_one(fleet)
    fleet.routed.tick()
    fleet.clock.advance(60.0)
    fleet.promise(0, free_seats=30)
    fleet.promise(1, running=1, waiting=3)
    fleet.routed.tick()
    assert [fleet.where(one) for one in asked] == [0, 0, 1, 1, 1]
    finish_whole(fleet, asked)


@grows
async def test_output_of_the_first_engine_that_comes_after_the_move_is_dropped(fleet: Fleet) -> None:
    asked = await full_engine_and_a_new_one(fleet)
    first = fleet.models[0]
    first.frozen = True
    first.step(2)
    fleet.routed.tick()
    assert [fleet.where(one) for one in asked] == [0, 0, 1, 1, 1]
    fleet.models[1].step()
    first.thaw()
    assert len(first.samples) == 2
    finish_whole(fleet, asked)


@grows
async def test_requests_stay_while_no_engine_is_better(fleet: Fleet) -> None:
    asked = await full_engine_and_a_new_one(fleet)
    fleet.promise(1, running=30, waiting=2)
    fleet.routed.tick()
    fleet.promise(1, free_seats=30, draining=True)
    fleet.routed.tick()
    assert [fleet.where(one) for one in asked] == [0] * 5
    finish_whole(fleet, asked)


@grows
async def test_one_that_cannot_be_moved_ends_alone_and_one_that_it_cancels_stays_away(fleet: Fleet) -> None:
    asked = await full_engine_and_a_new_one(fleet)
    fail, send = asked[2].reader.fail, fleet.models[1].send

    def fail_both(error: RoseinferError) -> None:
        fail(error)
        asked[3].live.cancel()

    def fail_once(message: ClientMessage) -> None:
        fleet.models[1].send = send  # type: ignore[method-assign]
        raise TypeError("planted")

    asked[2].reader.fail = fail_both  # type: ignore[method-assign]
    fleet.models[1].send = fail_once  # type: ignore[method-assign]
    fleet.routed.tick()
    ends = [type(one.reader.errors[0]) for one in asked[2:4]]
    assert ends == [InvalidRequestError, EngineClosedError]
    assert [fleet.where(one) for one in (*asked[:2], asked[4])] == [0, 0, 1] and len(fleet.models[1].adds) == 1
    finish_whole(fleet, [*asked[:2], asked[4]])


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_or_answered_twice_on_engines_with_few_seats(seed: int) -> None:
    rng, seats = random.Random(seed), 2

    def publish(fleet: Fleet, number: int) -> None:
        held = len(fleet.models[number].samples)
        fleet.promise(number, running=min(held, seats), waiting=max(0, held - seats), free_seats=max(0, seats - held))

    @grows
    async def check(fleet: Fleet) -> None:
        asked: list[Asked] = []
        for turn in range(120):
            if turn in (40, 60):
                await fleet.reach(fleet.add())
            if turn < 80 and rng.random() < 0.6:
                asked.append(fleet.submit(n=rng.choice((1, 1, 3)), max_tokens=rng.randint(1, 8)))
            for number, model in enumerate(fleet.models):
                running = list(model.samples)[:seats]
                model.frozen = rng.random() < 0.3
                model.step(1, lambda sample, running=running: sample.name in running)  # type: ignore[misc]
                publish(fleet, number)
            fleet.clock.advance(0.2)
            fleet.routed.tick()
            for model in fleet.models:
                if model.frozen:
                    model.thaw()
        moved = [one for one in asked if one.live.route is not None and one.live.route.placed_again]
        assert moved and all(one.live.route.placed_again == 1 for one in moved if one.live.route is not None)
        finish_whole(fleet, asked)

    check()
