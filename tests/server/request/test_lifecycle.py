"""Admission, the drain rate, and the guard, without a server."""

import asyncio

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.server.http.errors import MAX_RETRY_S, ApiError, unavailable
from roseinfer.server.request.lifecycle import DrainRate, Guard, Lifecycle, Ticket


def test_drain_rate() -> None:
    clock = ManualClock(100.0)
    rate = DrainRate(clock)
    assert rate.seconds_for(5) == 1.0, "nothing is known yet"
    for _ in range(4):
        rate.note()
        clock.advance(3.0)
    assert rate.seconds_for(5) == pytest.approx(15.0)
    assert rate.seconds_for(1000) == MAX_RETRY_S
    clock.advance(1000.0)
    assert rate.seconds_for(1) == MAX_RETRY_S, "a rate that has died down is not quoted for ever"


def code(lifecycle: Lifecycle) -> str | None:
    error = lifecycle.refusal()
    return None if error is None else error.code


def test_a_drain_refuses_new_requests() -> None:
    lifecycle = Lifecycle(2, ManualClock())
    assert code(lifecycle) is None
    lifecycle.begin_drain()
    assert code(lifecycle) == "draining"


def test_room_is_counted_in_prompts() -> None:
    lifecycle = Lifecycle(4, ManualClock())
    with Ticket(lifecycle) as ticket:
        ticket.grow(3)
        assert code(lifecycle) is None
        with Ticket(lifecycle):
            assert (lifecycle.requests, lifecycle.room.prompts) == (2, 4)
            assert code(lifecycle) == "queue_full"
            refusal = lifecycle.refusal()
            assert refusal is not None and "limit of prompts (--max-num-queued-reqs 4)" in refusal.message
        assert code(lifecycle) is None
    with pytest.raises(ZeroDivisionError), Ticket(lifecycle):
        raise ZeroDivisionError
    assert (lifecycle.requests, lifecycle.room.prompts) == (0, 0)


def test_nothing_starts_after_the_stop() -> None:
    lifecycle = Lifecycle(4, ManualClock())
    cause = unavailable("draining", "bye", 1.0)
    assert lifecycle.stop(cause) == 0
    with pytest.raises(ApiError, match="bye"):
        lifecycle.begin(Guard())


async def never() -> None:
    await asyncio.Event().wait()


def test_guarded_work_ends_by_itself() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError), Guard():
            raise ZeroDivisionError
        with Guard():
            await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize("early", [True, False])
def test_guarded_work_is_interrupted_by_the_first_cause(early: bool) -> None:
    async def main() -> str:
        guard = Guard()
        if early:
            guard.interrupt(ValueError("first"))
        else:
            asyncio.get_running_loop().call_soon(guard.interrupt, ValueError("first"))
            asyncio.get_running_loop().call_soon(guard.interrupt, KeyError("second"))
        with pytest.raises(ValueError, match="first"), guard:
            await never()
        await asyncio.sleep(0)  # the task itself goes on
        return "went on"

    assert asyncio.run(main()) == "went on"


def test_an_interruption_that_comes_too_late_changes_nothing() -> None:
    async def main() -> str:
        guard = Guard()
        with guard:
            await asyncio.sleep(0)
        guard.interrupt(ValueError("late"))
        await asyncio.sleep(0)
        return "went on"

    assert asyncio.run(main()) == "went on"


def test_who_cancels_the_guarded_task_is_obeyed() -> None:
    async def main() -> None:
        guard = Guard()

        async def work() -> None:
            with guard:
                await never()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        guard.interrupt(ValueError("not alone"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
