"""Engines that are added and removed while requests are served, transition by transition."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from roseinfer.cluster.status import EngineStatus
from roseinfer.core.errors import EngineClosedError, EngineDeadError, EngineUnavailableError
from roseinfer.engine.api import EngineHealth, EngineState
from roseinfer.engine.messages import Abort
from tests.helpers.engine_info import changed
from tests.helpers.model_engine import INFO
from tests.helpers.routed_fleet import Fleet, with_fleet


def dynamic(engines: int = 2) -> Callable[..., Callable[[], None]]:
    def decorate(work: Callable[[Fleet], Awaitable[None]]) -> Callable[[], None]:
        def test() -> None:
            asyncio.run(with_fleet(work, engines, dynamic=True))

        return test

    return decorate


@dynamic(1)
async def test_an_added_engine_gets_requests_once_it_is_connected(fleet: Fleet) -> None:
    number = fleet.add()
    assert number == 1 and fleet.where(fleet.submit()) == 0
    await fleet.reach(number)
    assert {fleet.where(fleet.submit()) for _ in range(4)} == {0, 1}
    assert fleet.observed.here == {0, 1}


@dynamic()
async def test_a_retiring_engine_hands_over_waiting_requests_and_finishes_running_ones(fleet: Fleet) -> None:
    running, _, waiting = [fleet.submit() for _ in range(3)]
    assert fleet.where(running) == fleet.where(waiting) == 0
    fleet.models[0].step(only=lambda sample: sample.add.request_id == running.live.wire_id)
    fleet.routed.retire(0, 5.0)
    fleet.routed.tick()
    assert fleet.where(running) == 0 and fleet.where(waiting) == 1
    assert all(fleet.where(fleet.submit()) == 1 for _ in range(3)), "it gets nothing more"
    assert fleet.routed.reports()[0].state is EngineState.DRAINING
    fleet.finish()
    running.check_whole()
    waiting.check_whole()
    assert running.live.route is not None and not running.live.route.resumes
    assert fleet.routed.has(0)
    fleet.routed.tick()
    assert not fleet.routed.has(0) and [report.engine for report in fleet.routed.reports()] == [1]
    assert fleet.observed.gone == {0}
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert fleet.models[0].dead, "the connection is closed"


@dynamic()
async def test_running_requests_move_when_the_retirement_timeout_ends(fleet: Fleet) -> None:
    asked = fleet.submit()
    fleet.models[0].step(2)
    fleet.routed.retire(0, 5.0)
    fleet.clock.advance(4.9)
    fleet.routed.tick()
    assert fleet.where(asked) == 0
    fleet.clock.advance(0.2)
    fleet.routed.tick()
    assert fleet.where(asked) == 1 and not fleet.routed.has(0)
    assert isinstance(fleet.models[0].heard[-1], Abort), "it holds nothing"
    fleet.finish()
    asked.check_whole()
    assert ("resumed", 0, "drain") in fleet.observed.said


@dynamic(1)
async def test_requests_without_another_engine_may_finish_where_they_are(fleet: Fleet) -> None:
    asked = fleet.submit()
    fleet.models[0].step(2)
    fleet.routed.retire(0, 0.0)
    fleet.routed.tick()
    with pytest.raises(EngineUnavailableError) as refused:
        fleet.submit()
    assert refused.value.retry_s >= 1.0
    fleet.finish()
    asked.check_whole()
    fleet.routed.tick()
    assert not fleet.routed.has(0) and fleet.routed.reports() == []
    health = fleet.routed.health()
    assert not health.alive and not health.final and health.error == "no engine is known"
    with pytest.raises(EngineUnavailableError):
        fleet.submit()
    await fleet.reach(fleet.add())
    assert fleet.where(fleet.submit()) == 1, "and the next one serves"


@dynamic(1)
async def test_an_engine_that_dies_while_it_retires_leaves_a_clear_error_or_none(fleet: Fleet) -> None:
    asked = fleet.submit()
    fleet.models[0].step(2)
    fleet.routed.retire(0, 5.0)
    fleet.routed.tick()
    fleet.die(0)
    assert [type(error) for error in asked.reader.errors] == [EngineUnavailableError], "it was to go anyway"
    fleet.routed.tick()
    assert not fleet.routed.has(0)


@dynamic()
async def test_a_number_is_given_once(fleet: Fleet) -> None:
    fleet.routed.retire(0, 0.0)
    fleet.routed.tick()
    assert not fleet.routed.has(0)
    fleet.routed.retire(0, 0.0)  # it has ended already
    assert fleet.add() == 2
    assert fleet.routed.add(lambda number: fleet.connector(1), 7) == 7
    assert fleet.routed.add(lambda number: fleet.connector(1), 0) == 8, "0 is another's, for ever"


@dynamic()
async def test_an_unlisted_engine_stays_as_long_as_it_can_be_reached(fleet: Fleet) -> None:
    fleet.routed.set_listed(0, False)
    fleet.routed.tick()
    assert {fleet.where(fleet.submit()) for _ in range(4)} == {0, 1}
    fleet.die(0)
    fleet.routed.tick()
    assert not fleet.routed.has(0) and fleet.routed.has(1)
    fleet.finish()


@dynamic()
async def test_counters_do_not_go_back_when_an_engine_goes(fleet: Fleet) -> None:
    for number, tokens in ((0, 5), (1, 7)):
        fleet.models[number].beat(generation_tokens=tokens, running=2, blocks_used=3, blocks_total=64)
    before = fleet.routed.stats()
    fleet.routed.retire(0, 0.0)
    fleet.routed.tick()
    after = fleet.routed.stats()
    assert before.generation_tokens == after.generation_tokens == 12
    assert (before.running, after.running) == (4, 2) and after.blocks_total == 64


@dynamic(1)
async def test_an_engine_of_another_sort_is_not_used(fleet: Fleet) -> None:
    for info, why in (
        (changed(INFO, model="/other/model"), "its model is model, but the other engines have fake"),
        (changed(INFO, weights="fp8"), "its weights is fp8, but the other engines have float32"),
        (changed(INFO, block_size=8), "its block_size is 8, but the other engines have 4"),
        (changed(INFO, max_model_len=128), "its max_model_len 128 is below that of the other engines (256)"),
    ):
        number = fleet.add(info)
        await fleet.reach(number)
        report = fleet.routed.reports()[-1]
        assert report.engine == number and report.state is not EngineState.READY and report.health.error == why
        assert fleet.models[number].dead, "the connection is closed"
    number = fleet.add(changed(INFO, model="/models/fake/", max_model_len=512))
    await fleet.reach(number)
    assert {fleet.where(fleet.submit()) for _ in range(4)} == {0, number}


def test_with_one_engine_that_stays_there_is_nothing_to_choose() -> None:
    async def work(fleet: Fleet) -> None:
        assert not fleet.routed.several

    asyncio.run(with_fleet(work, 1))


@dynamic(1)
async def test_requests_wait_when_all_engines_are_given_up(fleet: Fleet) -> None:
    """Other engines may be added, so waiting requests do not fail for good."""
    fleet.die(0)
    fleet.board.set_status(0, EngineStatus(EngineState.DEAD, 1, final=True))
    fleet.routed.tick()
    assert fleet.routed.reports()[0].health.final and not fleet.routed.health().final


@dynamic(0)
async def test_the_first_one_may_be_late(fleet: Fleet) -> None:
    assert fleet.routed.several
    opening = asyncio.create_task(fleet.routed.open())
    await asyncio.sleep(0.01)
    assert not opening.done() and fleet.routed.health() == EngineHealth(False, 0.0, "no engine is known")
    fleet.add()
    async with asyncio.timeout(10):
        await opening
    assert fleet.where(fleet.submit()) == 0


@dynamic()
async def test_a_closed_one_takes_no_engines(fleet: Fleet) -> None:
    await fleet.routed.close()
    with pytest.raises(EngineClosedError):
        fleet.add()


@dynamic(1)
async def test_without_other_engines_a_death_is_reported(fleet: Fleet) -> None:
    asked = fleet.submit()
    fleet.models[0].step()
    fleet.die(0)
    assert [type(error) for error in asked.reader.errors] == [EngineDeadError]
