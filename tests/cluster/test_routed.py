"""Several engines as one, transition by transition: placed, rejected, lost, hung, drained, restarted."""

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path

import pytest

from roseinfer.cluster.displaced import MAX_LATE_S, MAX_WAIT_S, SETTLE_S
from roseinfer.cluster.routing import new_ask, prompt_block_keys
from roseinfer.cluster.status import EngineStatus
from roseinfer.core.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineLostError,
    EngineUnavailableError,
    InvalidRequestError,
    RoseinferError,
    TooManyInflightError,
)
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Cause, Slo
from roseinfer.core.step_cost import StepCost
from roseinfer.engine.api import EngineState, GenerateRequest
from roseinfer.engine.messages import Abort
from roseinfer.kv.blocks import block_keys
from roseinfer.router.base import RoutingRequest
from roseinfer.router.record import RecordingPlacer
from roseinfer.sim.router_replay import replay_placements
from tests.helpers.engine_info import changed
from tests.helpers.routed_fleet import Asked, Fleet, with_fleet

COST = StepCost(step_s=0.01, token_s=1e-4, row_s=1e-4)
ASK = RoutingRequest(100, ttft_left_s=1.0)
HURRIED = RequestMeta(slo=Slo(ttft_s=1.0))


def fleet_test(engines: int = 2, router: str = "round-robin") -> Callable[..., Callable[[], None]]:
    def decorate(work: Callable[[Fleet], Awaitable[None]]) -> Callable[[], None]:
        def test() -> None:
            asyncio.run(with_fleet(work, engines, router))

        return test

    return decorate


@fleet_test()
async def test_requests_are_spread_and_each_keeps_to_its_engine(fleet: Fleet) -> None:
    asked = [fleet.submit(n=1 + i % 2) for i in range(6)]
    assert [fleet.where(one) for one in asked] == [0, 1] * 3
    assert fleet.routed.num_live == fleet.inflight.own == 6
    assert fleet.observed.said == [("placed", 0), ("placed", 1)] * 3
    fleet.finish()
    for one in asked:
        one.check_whole()


@fleet_test(router="pace")
async def test_keys_are_computed_once_and_the_same_prefix_goes_to_the_same_engine(fleet: Fleet) -> None:
    for number in fleet.engines:
        fleet.promise(number, cost=COST, free_seats=8, free_blocks=64)
    prompt = list(range(1, 142))
    first = fleet.submit(prompt=prompt)
    where = fleet.where(first)
    assert where is not None
    keys = b"".join(block_keys(prompt, 4, ""))
    assert fleet.models[where].adds[0].keys == keys and len(keys) == 35 * 32
    fleet.finish()
    for _ in range(5):
        fleet.clock.advance(1.0)
        assert fleet.where(fleet.submit(prompt=[*prompt[:140], 99])) == where


@fleet_test(engines=1)
async def test_one_engine_needs_no_router(fleet: Fleet) -> None:
    asked = fleet.submit()
    assert asked.live.route is None and not fleet.models[0].adds[0].keys
    refused = fleet.submit()
    sample = fleet.samples(refused)[0]
    fleet.models[0].refuse(sample, 2.5, Cause.IDLE)
    rejection = refused.reader.chunks[-1].rejection
    assert rejection is not None and (rejection.predicted_ttft_s, rejection.cause) == (2.5, Cause.IDLE)
    fleet.finish()
    asked.check_whole()


@fleet_test(engines=1)
async def test_with_one_engine_streams_end_with_it_and_the_next_one_serves(fleet: Fleet) -> None:
    asked = fleet.submit()
    fleet.models[0].step()
    fleet.die(0)
    assert [type(error) for error in asked.reader.errors] == [EngineDeadError]
    assert not fleet.routed.health().alive
    with pytest.raises(EngineUnavailableError) as raised:
        fleet.submit()
    assert raised.value.retry_s >= 3, "with two retries, clients wait longer than most starts take"
    assert [report.state for report in fleet.routed.reports()] == [EngineState.DEAD]
    await fleet.restart(0)
    again = fleet.submit()
    fleet.finish()
    again.check_whole()
    report = fleet.routed.reports()[0]
    assert (report.state, report.restarts, fleet.routed.health().alive) == (EngineState.READY, 1, True)


@fleet_test(engines=1)
async def test_a_single_draining_engine_gets_no_requests_and_a_quiet_one_keeps_its_requests(
    fleet: Fleet,
) -> None:
    asked = fleet.submit()
    fleet.freeze(0)
    fleet.routed.tick()
    more = fleet.submit()
    fleet.thaw(0)
    fleet.stand(0, EngineState.DRAINING)
    fleet.routed.tick()
    with pytest.raises(EngineUnavailableError):
        fleet.submit()
    fleet.finish()
    asked.check_whole()
    more.check_whole()


@fleet_test()
async def test_requests_without_output_are_placed_again_with_their_seed_and_age(fleet: Fleet) -> None:
    asked = fleet.submit(n=2, seed=None, meta=HURRIED)
    fleet.clock.advance(0.25)
    fleet.die(0)
    before, after = fleet.models[0].adds[0], fleet.models[1].adds[0]
    assert before.seed == after.seed is not None
    assert (before.age_s, after.age_s) == (0.0, pytest.approx(0.25 + SETTLE_S)) and after.outputs is None
    assert (before.moved, after.moved) == (False, True)
    assert fleet.observed.said == [("placed", 0), ("placed again", 0, "death")]
    fleet.finish()
    asked.check_whole()


@fleet_test()
async def test_requests_with_output_continue_where_they_were(fleet: Fleet) -> None:
    asked = fleet.submit(n=3, max_tokens=6)
    first = fleet.models[0]
    first.step(2, lambda sample: sample.index < 2)
    first.step(4, lambda sample: sample.index == 0)
    fleet.die(0)
    outputs = fleet.models[1].adds[0].outputs
    assert outputs is not None and [None if said is None else len(said.token_ids) for said in outputs] == [None, 2, 0]
    assert fleet.observed.said[1:] == [("resumed", 0, "death")]
    fleet.finish()
    asked.check_whole()


@fleet_test()
async def test_stop_strings_are_found_across_the_seam(fleet: Fleet) -> None:
    ids = fleet.submit(max_tokens=12, seed=3, prompt=[1, 2, 3])
    text = bytes(ids.expected()).decode()
    asked = fleet.submit(max_tokens=12, seed=3, prompt=[1, 2, 3], stop=(text[4:8],))
    where = fleet.where(asked)
    assert where is not None
    fleet.models[where].step(6)
    assert "".join(chunk.text for chunk in asked.reader.chunks) == text[:4], "the rest may begin a stop string"
    fleet.die(where)
    fleet.models[1 - where].step(2)
    assert "".join(chunk.text for chunk in asked.reader.chunks) == text[:4]
    assert asked.reader.ends == [FinishReason.STOP] and not fleet.samples(asked)


@fleet_test(engines=3)
async def test_a_second_loss_ends_a_request(fleet: Fleet) -> None:
    asked = fleet.submit()
    fleet.models[0].step()
    fleet.die(0)
    fleet.die(fleet.where(asked))
    assert [type(error) for error in asked.reader.errors] == [EngineLostError]
    asked.check_part()
    assert not fleet.models[2].adds, "it may be what ends engines"


@fleet_test()
async def test_without_another_engine_streams_end_with_the_last(fleet: Fleet) -> None:
    fleet.die(0)
    begun = fleet.submit()
    fleet.models[1].step()
    waits = fleet.submit()
    fleet.die(1)
    assert [type(error) for error in begun.reader.errors] == [EngineDeadError]
    assert not waits.ended, "it has sent nothing, so it may begin again"
    with pytest.raises(EngineUnavailableError):
        fleet.submit()
    await fleet.restart(0)
    again = fleet.submit()
    fleet.finish()
    waits.check_whole()
    again.check_whole()


@pytest.mark.parametrize("state", [EngineState.DRAINING, EngineState.QUIET])
def test_requests_move_to_an_engine_that_gets_no_new_ones_rather_than_end(state: EngineState) -> None:
    """One engine is about to be restarted, or has no heartbeat, when the other one dies."""

    @fleet_test()
    async def work(fleet: Fleet) -> None:
        asked = [fleet.submit() for _ in range(4)]
        begun = fleet.samples(asked[1])[0].name
        fleet.models[1].step(only=lambda sample: sample.name == begun)
        fleet.stand(0, state)
        fleet.die(1)
        assert [fleet.where(one) for one in asked] == [0, 0, 0, None]
        await fleet.restart(1)
        assert fleet.where(asked[3]) == 1, "it has no output and can wait"
        fleet.finish()
        for one in asked:
            one.check_whole()

    work()


@fleet_test()
async def test_an_engine_whose_death_is_noticed_later_counts_as_a_second_loss(fleet: Fleet) -> None:
    asked = [fleet.submit() for _ in range(4)]
    fleet.models[1].dead = True  # and its loss is not noticed yet
    fleet.die(0)
    assert {fleet.where(one) for one in asked} == {1}
    fleet.models[1].dead = False
    fleet.die(1)
    for one in asked[::2]:
        (error,) = one.reader.errors
        assert isinstance(error, EngineLostError) and not error.only_suspect and error.retry_s
    assert not any(one.reader.errors for one in asked[1::2])
    await fleet.restart(0)


@fleet_test(engines=4)
async def test_of_engines_that_die_at_once_requests_go_on_with_the_last(fleet: Fleet) -> None:
    asked = [fleet.submit() for _ in range(8)]
    for model in fleet.models:
        model.step(2, lambda sample: sample.add.prompt.ids[0] < 4)  # the first four requests
    fleet.die(0, 1, 2)
    assert {fleet.where(one) for one in asked} == {3} and len(fleet.models[3].adds) == 8
    fleet.finish()
    for one in asked:
        one.check_whole()


@fleet_test()
async def test_requests_without_output_wait_for_an_engine_if_all_die_at_once(fleet: Fleet) -> None:
    begun, *waiting = [fleet.submit(n=2, seed=None) for _ in range(5)]
    fleet.models[0].step(1, lambda sample: sample.add.prompt.ids[0] == begun.request.prompt.ids[0])
    fleet.die(0, 1)
    assert [type(error) for error in begun.reader.errors] == [EngineDeadError]
    fleet.clock.advance(5.0)
    fleet.routed.tick()
    assert not any(one.ended for one in waiting) and fleet.routed.num_live == 4
    await fleet.restart(1)
    assert {fleet.where(one) for one in waiting} == {1}
    assert fleet.models[1].adds[0].age_s == pytest.approx(5.0 + SETTLE_S)
    assert fleet.observed.said.count(("placed again", 0, "death")) == 2
    assert fleet.observed.said.count(("placed again", 1, "death")) == 2
    fleet.finish()
    for one in waiting:
        one.check_whole()


@fleet_test()
async def test_requests_of_dead_engines_wait_for_a_bounded_time_within_their_objectives(fleet: Fleet) -> None:
    metas = [HURRIED, RequestMeta(slo=Slo(ttft_s=5.0)), RequestMeta(slo=Slo(e2e_s=8.0)), RequestMeta()]
    metas.append(RequestMeta(deadline_s=fleet.clock.now() + 5.0))
    asked = [fleet.submit(meta=meta) for meta in metas]
    fleet.die(0, 1)
    ended = []
    for passed_s in (0.0, 4.2, 2.9, MAX_WAIT_S - 9.0, 1.0):
        fleet.clock.advance(passed_s)
        fleet.routed.tick()
        ended.append([one.ended for one in asked])
    assert ended[0] == [True, False, False, False, False], "an engine would come too late for the first"
    assert ended[1] == [True, True, False, False, True]
    assert ended[2] == ended[3] == [True, True, True, False, True]
    assert all(ended[4])
    for one in asked:
        (error,) = one.reader.errors
        assert isinstance(error, EngineUnavailableError) and error.retry_s >= 3


@fleet_test()
async def test_requests_do_not_wait_for_engines_that_start_slowly_or_not_at_all(fleet: Fleet) -> None:
    for endpoint in fleet.routed.endpoints:
        endpoint.info = changed(fleet.routed.info, startup_s={"engine": MAX_WAIT_S + 10.0})
    slow = fleet.submit()
    fleet.die(0, 1)
    (error,) = slow.reader.errors
    assert isinstance(error, EngineUnavailableError) and error.retry_s > MAX_WAIT_S
    for number in fleet.engines:
        await fleet.restart(number)
        fleet.routed.endpoints[number].info = changed(fleet.routed.info, startup_s={"engine": 1.0})
    final = fleet.submit()
    for number in fleet.engines:
        fleet.lose(number)
        fleet.board.set_status(number, EngineStatus(EngineState.DEAD, 2, final=True))
    fleet.clock.advance(SETTLE_S)
    fleet.routed.tick()
    assert [type(error) for error in final.reader.errors] == [EngineUnavailableError]


@fleet_test()
async def test_losses_that_were_not_read_in_time_are_read_before_requests_move(fleet: Fleet) -> None:
    """The process was held up for longer than it waits for other losses: it waits once more."""
    asked = [fleet.submit() for _ in range(2)]
    lost = fleet.where(asked[0])
    assert lost is not None
    fleet.lose(lost)
    fleet.clock.advance(SETTLE_S + 2 * MAX_LATE_S)
    fleet.routed.place_displaced()
    assert fleet.where(asked[0]) is None
    fleet.settle()
    assert fleet.where(asked[0]) == 1 - lost
    fleet.finish()


@fleet_test()
async def test_an_engine_that_is_ending_gets_no_requests(fleet: Fleet) -> None:
    """Show an ended process whose connection is still there."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    asked = [fleet.submit() for _ in range(2)]
    lost = fleet.where(asked[0])
    assert lost is not None and fleet.where(asked[1]) == 1 - lost
    number = fleet.board.status(1 - lost).number
    fleet.board.set_status(1 - lost, EngineStatus(EngineState.READY, number, pid=ended.pid))
    fleet.lose(lost)
    fleet.settle()
    assert fleet.where(asked[0]) is None, "it waits"
    fleet.lose(1 - lost)
    await fleet.restart(lost)
    fleet.settle()
    assert [fleet.where(one) for one in asked] == [lost] * 2
    fleet.finish()


@fleet_test()
async def test_a_request_may_be_cancelled_while_it_waits_for_an_engine(fleet: Fleet) -> None:
    asked = [fleet.submit() for _ in range(2)]
    fleet.die(0, 1)
    asked[0].live.cancel()
    await fleet.restart(0)
    assert [fleet.where(one) for one in asked] == [None, 0]
    fleet.finish()
    asked[1].check_whole()


@fleet_test()
async def test_the_end_of_the_client_ends_requests_that_wait_for_an_engine(fleet: Fleet) -> None:
    asked = fleet.submit()
    fleet.die(0, 1)
    await fleet.routed.close()
    assert [type(error) for error in asked.reader.errors] == [EngineClosedError]


@fleet_test(engines=3)
async def test_a_request_that_a_failure_names_alone_ends_alone(fleet: Fleet) -> None:
    asked = [fleet.submit(n=2) for _ in range(9)]
    here = [one for one in asked if fleet.where(one) == 0]
    fleet.fail(0, *fleet.samples(here[1]))
    (error,) = here[1].reader.errors
    assert isinstance(error, EngineLostError) and error.only_suspect and "planted failure" in str(error)
    fleet.finish()
    for one in asked:
        if one is not here[1]:
            one.check_whole()


@fleet_test(engines=4)
async def test_of_several_suspects_each_gets_one_more_engine_and_the_others_three(fleet: Fleet) -> None:
    asked = [fleet.submit() for _ in range(12)]
    here = [one for one in asked if fleet.where(one) == 0]
    bystander, suspects = here[0], here[1:]
    fleet.fail(0, *(sample for one in suspects for sample in fleet.samples(one)))
    assert not any(one.reader.errors for one in here)
    await fleet.restart(0)
    for one in suspects:
        where = fleet.where(one)
        assert where is not None
        if fleet.where(bystander) != where:
            fleet.requests_to(where, bystander)
        others = [other for other in asked if fleet.where(other) == where and other is not bystander]
        fleet.fail(where, *(sample for other in others for sample in fleet.samples(other)))
        assert [type(error) for error in one.reader.errors] == [EngineLostError]
        await fleet.restart(where)
    assert not bystander.reader.errors
    fleet.finish()
    bystander.check_whole()


@fleet_test()
async def test_a_lost_connection_is_restored_and_missed_aborts_are_sent(fleet: Fleet) -> None:
    asked = fleet.submit()
    fleet.models[0].step()
    await fleet.reconnect(0)
    assert fleet.where(asked) == 1
    more = [fleet.submit() for _ in range(4)]
    assert {fleet.where(one) for one in more} == {0, 1}
    fleet.finish()
    for one in [asked, *more]:
        one.check_whole()


@fleet_test()
async def test_from_a_frozen_engine_all_go_and_its_late_tokens_are_dropped(fleet: Fleet) -> None:
    asked = [fleet.submit() for _ in range(4)]
    for model in fleet.models:
        model.step(2, lambda sample: sample.add.prompt.ids[0] < 2)
    fleet.freeze(0)
    fleet.models[0].step(2)  # in flight when it froze
    fleet.routed.tick()
    assert {fleet.where(one) for one in asked} == {1}
    assert [report.state for report in fleet.routed.reports()] == [EngineState.QUIET, EngineState.READY]
    assert fleet.where(fleet.submit()) == 1
    before = [one.reader.ids() for one in asked]
    fleet.thaw(0)
    assert [one.reader.ids() for one in asked] == before
    assert not fleet.models[0].samples, "it has been told that they are gone"
    fleet.routed.tick()
    assert {fleet.where(fleet.submit()) for _ in range(2)} == {0, 1}
    fleet.finish()
    for one in asked:
        one.check_whole()
    assert ("resumed", 0, "quiet") in fleet.observed.said and ("placed again", 0, "quiet") in fleet.observed.said


@fleet_test()
async def test_a_request_that_hangs_one_engine_after_the_other_stays_with_the_second(fleet: Fleet) -> None:
    asked = fleet.submit()
    fleet.freeze(0)
    fleet.routed.tick()
    assert fleet.where(asked) == 1
    fleet.thaw(0)
    fleet.freeze(1)
    fleet.routed.tick()
    assert fleet.where(asked) == 1
    fleet.die(1)
    assert [type(error) for error in asked.reader.errors] == [EngineLostError]


@fleet_test()
async def test_with_all_engines_frozen_requests_wait_where_they_are(fleet: Fleet) -> None:
    asked = [fleet.submit() for _ in range(2)]
    fleet.freeze(0)
    fleet.freeze(1)
    fleet.routed.tick()
    assert [fleet.where(one) for one in asked] == [0, 1]
    with pytest.raises(EngineUnavailableError):
        fleet.submit()
    fleet.thaw(0)
    fleet.routed.tick()
    assert {fleet.where(one) for one in asked} == {0}
    fleet.thaw(1)
    fleet.finish()
    for one in asked:
        one.check_whole()


@fleet_test()
async def test_waiting_requests_leave_a_draining_engine_and_running_ones_stay(fleet: Fleet) -> None:
    begun, _, waits = (fleet.submit() for _ in range(3))
    fleet.models[0].step(1, lambda sample: sample.name.startswith(begun.live.wire_id + ":"))
    fleet.promise(0, draining=True)
    fleet.routed.tick()
    assert [fleet.where(begun), fleet.where(waits)] == [0, 1]
    assert fleet.where(fleet.submit()) == fleet.where(fleet.submit()) == 1
    assert fleet.routed.reports()[0].state is EngineState.DRAINING
    fleet.stand(0, EngineState.DRAINING)
    fleet.die(0)
    assert fleet.where(begun) == 1
    await fleet.restart(0)
    fleet.die(1)
    assert fleet.where(begun) == 0, "the end of a drain is no loss"
    fleet.finish()
    begun.check_whole()
    said = fleet.observed.said
    assert ("placed again", 0, "drain") in said and ("resumed", 0, "drain") in said
    ways = [one.live.route for one in (begun, waits)]
    # Requests with output have lost two engines. Waiting requests had moved and had no output when that one died.
    assert [(way.engine, way.placed_again, way.resumes) for way in ways] == [(0, 0, 2), (0, 2, 0)]


@fleet_test()
async def test_when_all_engines_drain_requests_stay(fleet: Fleet) -> None:
    asked = [fleet.submit() for _ in range(2)]
    for number in fleet.engines:
        fleet.stand(number, EngineState.DRAINING)
    fleet.routed.tick()
    assert [fleet.where(one) for one in asked] == [0, 1]
    with pytest.raises(EngineUnavailableError):
        fleet.submit()
    fleet.finish()
    for one in asked:
        one.check_whole()


@fleet_test()
async def test_a_rejection_is_hidden_if_another_engine_can_meet_the_objective(fleet: Fleet) -> None:
    for number in fleet.engines:
        fleet.promise(number, cost=COST, free_seats=8, free_blocks=64)
    asked = fleet.submit(n=2, meta=HURRIED)
    fleet.models[0].refuse(fleet.samples(asked)[0])
    assert fleet.where(asked) == 1 and not asked.reader.chunks
    assert fleet.observed.said == [("placed", 0), ("retried", 0)]
    assert asked.live.route is not None and (asked.live.route.engine, asked.live.route.retries) == (1, 1)
    fleet.models[1].refuse(fleet.samples(asked)[0], 9.0)
    assert [chunk.finish_reason for chunk in asked.reader.chunks] == [FinishReason.REJECTED], "once"
    asked.live.cancel()  # as the server does: the other sample is useless


@pytest.mark.parametrize("said", [(3.0, 4.0, 3.0), (4.0, 3.0, 3.0), (None, 4.0, 4.0), (3.0, None, 3.0), (None,) * 3])
def test_the_offered_objective_is_the_best_of_the_asked_engines(said: tuple[float | None, ...]) -> None:
    @fleet_test()
    async def scenario(fleet: Fleet) -> None:
        for number in fleet.engines:
            fleet.promise(number, cost=COST, free_seats=8, free_blocks=64)
        asked = fleet.submit(meta=HURRIED)
        for number in fleet.engines:
            fleet.models[number].refuse(fleet.samples(asked)[0], attainable_s=said[number])
        rejection = asked.reader.chunks[-1].rejection
        assert rejection is not None and rejection.attainable_s == said[2]

    scenario()


@fleet_test()
async def test_a_final_rejection_reports_what_the_fleet_could_do(fleet: Fleet) -> None:
    busy = {"cost": COST, "waiting_tokens": (0,) * 7 + (40_000,), "waiting": 9, "best_effort": 0}
    fleet.promise(0, **{**busy, "fill_tokens": 60_000})
    fleet.promise(1, **{**busy, "fill_tokens": 30_000})
    asked = fleet.submit(meta=HURRIED)
    fleet.clock.advance(0.5)
    fleet.models[0].refuse(fleet.samples(asked)[0], 60.0, Cause.IDLE)
    rejection = asked.reader.chunks[-1].rejection
    assert rejection is not None
    assert 3.0 < rejection.predicted_ttft_s < 10.0, "with its age, in the better of the two"
    assert not rejection.hopeless, "either would keep it if it were idle"
    fleet.clock.advance(0.5)
    far = RequestMeta(slo=Slo(ttft_s=1e-4))
    asked = fleet.submit(meta=far)
    where = fleet.where(asked)
    assert where is not None
    fleet.models[where].refuse(fleet.samples(asked)[0], 60.0, Cause.IDLE)
    rejection = asked.reader.chunks[-1].rejection
    assert rejection is not None and rejection.hopeless


@fleet_test()
async def test_a_moved_request_asks_for_its_open_samples(fleet: Fleet) -> None:
    asked = fleet.submit(n=3)
    live = asked.live
    assert live.routing is not None and live.routing.placement.request.samples == 3
    for _ in range(3):
        fleet.models[0].step()
    for _ in range(3):
        fleet.models[0].step(only=lambda sample: sample.name.endswith(":1"))
    assert len(asked.reader.ends) == 1
    fleet.die(0)
    ask = live.routing.placement.request
    assert (ask.samples, ask.prompt_tokens) == (2, 5 + 3)
    fleet.finish()


@pytest.mark.parametrize("end", ["die", "freeze"])
def test_moved_requests_keep_their_order(end: str) -> None:
    """An engine puts resumed requests first, so the oldest of them is sent last."""

    @fleet_test()
    async def work(fleet: Fleet) -> None:
        asked = [fleet.submit() for _ in range(12)][::2]
        begun = {fleet.samples(one)[0].name for one in asked[:3]}
        fleet.models[0].step(only=lambda sample: sample.name in begun)
        sent = len(fleet.models[1].adds)
        getattr(fleet, end)(0)
        fleet.routed.tick()
        got = [add.prompt.ids for add in fleet.models[1].adds[sent:]]
        assert got == [one.request.prompt.ids for one in [*asked[3:], *reversed(asked[:3])]]
        if end == "freeze":
            fleet.thaw(0)
        fleet.finish()

    work()


@fleet_test()
async def test_one_that_cannot_be_moved_from_an_engine_that_hangs_ends(fleet: Fleet) -> None:
    asked = [fleet.submit() for _ in range(4)]
    observed, times = fleet.observed.placed_again, iter(range(3))

    def fails_once(engine: int, cause: str) -> None:
        if next(times) == 0:
            raise LookupError("planted")
        observed(engine, cause)

    fleet.observed.placed_again = fails_once  # type: ignore[method-assign]
    fleet.freeze(0)
    fleet.routed.tick()
    fleet.thaw(0)
    fleet.finish()
    assert [[type(error) for error in one.reader.errors] for one in asked] == [[EngineDeadError], [], [], []]


@fleet_test(router="pace")
async def test_the_router_gets_each_promise_whoever_refreshes_an_engine(fleet: Fleet) -> None:
    for number in fleet.engines:
        fleet.promise(number, cost=COST, free_seats=8, free_blocks=64)
    fleet.routed.reports()
    placer = fleet.routed.placer
    assert placer is not None
    assert all(placer.forecast(number, ASK, 100.0).ttft_s for number in fleet.engines)
    fleet.die(0)
    fleet.replace(0)
    fleet.promise(0, cost=COST, free_seats=8, free_blocks=64)
    fleet.routed.tick()  # before it is connected
    await fleet.reach(0)
    assert placer.forecast(0, ASK, 100.0).ttft_s, "it has said so before"


@fleet_test()
async def test_a_request_counts_as_hopeless_by_its_objectives_without_its_wait(fleet: Fleet) -> None:
    for number in fleet.engines:
        fleet.promise(number, cost=COST, fill_tokens=60_000)
    asked = fleet.submit(meta=RequestMeta(slo=Slo(e2e_s=10.0), predicted_len=6))
    fleet.clock.advance(9.99)
    fleet.models[0].refuse(fleet.samples(asked)[0], 60.0, Cause.IDLE)
    rejection = asked.reader.chunks[-1].rejection
    assert rejection is not None and not rejection.hopeless


@fleet_test()
async def test_without_a_cost_model_the_engine_decides_whether_a_request_is_hopeless(fleet: Fleet) -> None:
    asked = fleet.submit(meta=HURRIED)
    fleet.models[0].refuse(fleet.samples(asked)[0], 60.0, Cause.IDLE)
    rejection = asked.reader.chunks[-1].rejection
    assert rejection is not None and rejection.hopeless


@fleet_test()
async def test_a_request_that_moves_can_be_cancelled(fleet: Fleet) -> None:
    asked = [fleet.submit(n=2) for _ in range(2)]
    fleet.models[0].step()
    fleet.freeze(0)
    fleet.routed.tick()
    for one in asked:
        one.live.cancel()
        one.live.cancel()
        assert [type(error) for error in one.reader.errors] == [EngineClosedError]
    fleet.thaw(0)


@fleet_test()
async def test_one_reader_may_cancel_another_request_when_its_own_fails(fleet: Fleet) -> None:
    first, second = fleet.submit(), fleet.submit()
    fleet.die(1)
    third, fourth = fleet.submit(), fleet.submit()

    def cancel_with(failing: Asked, other: Asked) -> None:
        fail = failing.reader.fail

        def fail_both(error: RoseinferError) -> None:
            fail(error)
            other.live.cancel()

        failing.reader.fail = fail_both  # type: ignore[method-assign]

    cancel_with(second, third)
    cancel_with(first, fourth)
    fleet.die(0)
    fleet.clock.advance(MAX_WAIT_S)
    fleet.routed.tick()
    assert [type(one.reader.errors[0]) for one in (first, second, third, fourth)] == [
        EngineUnavailableError,
        EngineLostError,
        EngineClosedError,
        EngineClosedError,
    ]


@fleet_test()
async def test_a_request_that_is_cancelled_when_another_fails_does_not_move(fleet: Fleet) -> None:
    poisoned, _, beside = (fleet.submit() for _ in range(3))
    fail = poisoned.reader.fail

    def fail_both(error: RoseinferError) -> None:
        fail(error)
        beside.live.cancel()

    poisoned.reader.fail = fail_both  # type: ignore[method-assign]
    fleet.fail(0, *fleet.samples(poisoned))
    assert [type(error) for error in beside.reader.errors] == [EngineClosedError]
    assert len(fleet.models[1].adds) == 1, "that of the one between them"


@fleet_test()
async def test_an_engine_that_dies_as_soon_as_it_is_up_gets_no_requests(fleet: Fleet) -> None:
    fleet.die(0)
    fleet.replace(0)
    fleet.models[0].dies_at_once = True
    await fleet.reach(0)
    assert not fleet.routed.endpoints[0].accepts_requests
    fleet.clock.advance(1.0)
    assert {fleet.where(fleet.submit()) for _ in range(3)} == {1}


@fleet_test()
async def test_an_engine_that_was_frozen_for_long_is_used_again_at_once(fleet: Fleet) -> None:
    fleet.freeze(0)
    for _ in range(50):
        fleet.clock.advance(0.2)
        fleet.routed.tick()
    fleet.thaw(0)
    fleet.clock.advance(0.2)
    assert {fleet.where(fleet.submit()) for _ in range(2)} == {0, 1}
    assert not [said for said in fleet.observed.said if said[0] == "breaker"]


@fleet_test()
async def test_an_invalid_request_is_rejected_at_once_and_costs_nothing(fleet: Fleet) -> None:
    fleet.inflight.limit = 1
    for wrong in ([2**70], [1.5], ["1"]):
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            fleet.submit(prompt=wrong)
    assert fleet.routed.num_live == 0
    fleet.submit()
    with pytest.raises(TooManyInflightError):
        fleet.submit()
    fleet.die(0)
    with pytest.raises(TooManyInflightError):
        fleet.submit()


@fleet_test(engines=3)
async def test_health_and_stats_are_those_of_all(fleet: Fleet) -> None:
    fleet.clock.advance(5.0)
    fleet.models[1].beat()
    fleet.clock.advance(1.0)
    assert fleet.routed.health().alive and fleet.routed.health().heartbeat_age_s == 1.0
    fleet.lose(1)
    fleet.lose(0)
    assert fleet.routed.health().alive and fleet.routed.health().heartbeat_age_s == 6.0
    fleet.lose(2)
    health = fleet.routed.health()
    assert (health.alive, health.error) == (False, "planted death")
    assert [report.engine for report in fleet.routed.reports()] == [0, 1, 2]


@fleet_test(engines=2)
async def test_counts_continue_over_restarts_but_requests_of_a_dead_engine_do_not(fleet: Fleet) -> None:
    for model in fleet.models:
        model.beat(steps_done=5, running=2)
    fleet.die(0)
    assert (fleet.routed.stats().steps_done, fleet.routed.stats().running) == (10, 2)
    await fleet.restart(0)
    fleet.models[0].beat(steps_done=3, running=1)
    assert (fleet.routed.stats().steps_done, fleet.routed.stats().running) == (13, 3)
    await fleet.reconnect(0)
    fleet.models[0].beat(steps_done=4)
    assert fleet.routed.stats().steps_done == 14, "it is the same process"
    assert [report.restarts for report in fleet.routed.reports()] == [1, 0]


@fleet_test(engines=1)
async def test_requests_that_a_planned_restart_ends_may_be_retried(fleet: Fleet) -> None:
    """No request has caused the end of the process, and another process is starting."""
    asked = fleet.submit()
    fleet.models[0].step()
    fleet.stand(0, EngineState.DRAINING)
    fleet.routed.tick()
    fleet.die(0)
    assert [type(error) for error in asked.reader.errors] == [EngineUnavailableError]


@fleet_test(engines=1)
async def test_an_engine_that_is_about_to_be_restarted_is_back_after_all_of_its_start(fleet: Fleet) -> None:
    fleet.routed.endpoints[0].info = changed(fleet.routed.info, startup_s={"engine": 40.0})
    fleet.clock.advance(1000.0)
    fleet.stand(0, EngineState.DRAINING)
    fleet.routed.tick()
    for passed_s, wait_s in ((0.0, 40.0), (5.0, 40.0)):
        fleet.clock.advance(passed_s)
        with pytest.raises(EngineUnavailableError) as raised:
            fleet.submit()
        assert raised.value.retry_s == wait_s
    fleet.lose(0)
    fleet.clock.advance(15.0)
    with pytest.raises(EngineUnavailableError) as raised:
        fleet.submit()
    assert raised.value.retry_s == 25.0


@fleet_test(engines=2)
async def test_restarts_are_those_of_the_engine_also_for_late_clients(fleet: Fleet) -> None:
    fleet.stand(1, EngineState.READY, 4)
    assert [report.restarts for report in fleet.routed.reports()] == [0, 3]


@fleet_test(engines=3)
async def test_an_engine_that_its_owner_knows_to_be_dead_gets_nothing(fleet: Fleet) -> None:
    fleet.stand(0, EngineState.DEAD)
    fleet.clock.advance(1.0)
    assert {fleet.where(fleet.submit()) for _ in range(4)} == {1, 2}
    fleet.clock.advance(1.0)
    fleet.stand(0, EngineState.READY)
    assert {fleet.where(fleet.submit()) for _ in range(3)} == {0, 1, 2}


@fleet_test()
async def test_a_request_that_cannot_be_moved_does_not_affect_the_others(fleet: Fleet) -> None:
    asked = [fleet.submit() for _ in range(6)]
    observed, times = fleet.observed.placed_again, iter(range(3))

    def fails_once(engine: int, cause: str) -> None:
        if next(times) == 1:
            raise LookupError("planted")
        observed(engine, cause)

    fleet.observed.placed_again = fails_once  # type: ignore[method-assign]
    fleet.die(0)
    assert [type(error) for one in asked for error in one.reader.errors] == [EngineDeadError]
    fleet.finish()
    assert sum(one.reader.ends == [FinishReason.LENGTH] for one in asked) == 5


def test_questions_to_a_router() -> None:
    def ask(predicted: int | None = None, **objectives: float) -> tuple[float, float, float]:
        meta = RequestMeta(arrival_s=10.0, slo=Slo(**objectives), predicted_len=predicted)
        request = GenerateRequest(request_id="a", prompt=Prompt([1] * 9, SequenceParams(), meta))
        found = new_ask(request, prompt_block_keys(request, 4), 4, 10.5)
        assert (found.prompt_tokens, found.block_size, len(found.keys)) == (9, 4, 2)
        assert found.output_tokens == (predicted or 0)
        return found.ttft_left_s, found.tpot_s, found.end_left_s

    assert ask() == (inf, inf, inf)
    assert ask(ttft_s=2.0, tpot_s=0.1) == (1.5, 0.1, inf)
    assert ask(100, ttft_s=2.0, e2e_s=8.5) == (1.5, inf, 8.0)
    assert ask(10, e2e_s=0.25) == (inf, inf, -0.25)


def test_closing_ends_open_requests_and_rejects_new_ones() -> None:
    async def work(fleet: Fleet) -> None:
        asked = [fleet.submit() for _ in range(3)]
        await fleet.routed.close()
        assert [type(one.reader.errors[0]) for one in asked] == [EngineClosedError] * 3
        with pytest.raises(EngineClosedError):
            fleet.submit()
        assert not fleet.routed.health().alive and len(fleet.routed.reports()) == 2

    asyncio.run(with_fleet(work))


def test_engines_are_connected_in_the_background_and_again_after_a_loss() -> None:
    async def work(fleet: Fleet) -> None:
        fleet.models[0].dead = True
        await fleet.routed.open()
        assert [endpoint.accepts_requests for endpoint in fleet.routed.endpoints] == [False, True]
        fleet.replace(0)
        fleet.die(1)
        async with asyncio.timeout(20):
            while not fleet.routed.endpoints[0].accepts_requests:
                await asyncio.sleep(0.01)
        asked = fleet.submit()
        assert fleet.where(asked) == 0
        fleet.stand(0, EngineState.DRAINING)
        fleet.replace(1)
        async with asyncio.timeout(20):
            while fleet.where(asked) != 1:
                await asyncio.sleep(0.01)
        assert isinstance(fleet.models[0].heard[-1], Abort)

    asyncio.run(with_fleet(work, reached=False))


def test_decisions_of_the_router_can_be_recorded(tmp_path: Path) -> None:
    async def main() -> None:
        fleet = Fleet(tmp_path, 2, "pace", record=tmp_path / "record")
        await fleet.reach()
        fleet.promise(0, cost=COST)
        fleet.clock.advance(1.0)
        where = fleet.where(fleet.submit(prompt=[1] * 9, meta=HURRIED))
        for state in (EngineState.READY, EngineState.QUIET, EngineState.QUIET):
            fleet.stand(1, state)
            fleet.routed.tick()
        await fleet.routed.close()
        assert isinstance(fleet.routed.placer, RecordingPlacer)
        fleet.routed.placer.close()
        lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
        placed = [line for line in lines if "place" in line]
        assert [line["place"][0] for line in placed] == [where] and len(placed[0]["ask"][1]) == 2
        assert any(line.get("update") == 0 for line in lines)
        ups = [line["is"] for line in lines if line.get("up") == 1]
        assert ups == [False, True, False], "what is as it was is not said again"

    asyncio.run(main())


def test_decisions_over_added_and_removed_engines_can_be_replayed(tmp_path: Path) -> None:
    async def main() -> None:
        fleet = Fleet(tmp_path, 2, "pace", record=tmp_path / "record", dynamic=True)
        await fleet.reach()
        for number in range(6):
            fleet.submit()
            fleet.promise(fleet.add(), cost=COST)
            await fleet.reach(fleet.engines[-1])
            fleet.routed.retire(number, 0.0)
            fleet.routed.tick()
            fleet.clock.advance(0.1)
        await fleet.routed.close()

    asyncio.run(main())
    found = replay_placements(tmp_path / "record")
    assert found.same == len(found.recorded) >= 6 and len({where[0] for where in found.recorded if where}) > 2


def test_an_unwritable_recording_stops_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        fleet = Fleet(tmp_path, 2, record=tmp_path / "missing" / "file")
        with pytest.raises(ConfigError, match="record"):
            await fleet.routed.open()
        await fleet.routed.close()

    asyncio.run(main())


@fleet_test(engines=6)
async def test_for_a_host_that_is_cut_off_no_request_is_to_blame(fleet: Fleet) -> None:
    """A request that lost two engines in this way survives one crash, and ends at the second."""
    asked = fleet.submit()
    for number in (0, 1):
        assert fleet.where(asked) == number
        fleet.models[number].step()
        fleet.freeze(number, host_lost=True)
        fleet.routed.tick()
    assert fleet.where(asked) == 2
    fleet.models[2].step()
    fleet.die(2)
    assert fleet.where(asked) == 3
    fleet.models[3].step()
    fleet.die(3)
    assert [type(error) for error in asked.reader.errors] == [EngineLostError]
    for number in (0, 1):
        fleet.thaw(number)


@fleet_test(engines=6)
async def test_a_request_under_which_three_hosts_were_cut_off_stays_with_the_fourth(fleet: Fleet) -> None:
    asked = fleet.submit(max_tokens=9)
    for number in range(4):
        assert fleet.where(asked) == number
        fleet.models[number].step()
        fleet.freeze(number, host_lost=True)
        fleet.routed.tick()
    assert fleet.where(asked) == 3 and not asked.ended
    for number in range(4):
        fleet.thaw(number)
    fleet.finish()
    asked.check_whole()
