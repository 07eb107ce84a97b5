"""Admission, the drain rate, and the supervisor, without a server."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from roseinfer.core.clock import ManualClock
from roseinfer.server.errors import ApiError, unavailable
from roseinfer.server.lifecycle import MAX_RETRY_S, DrainRate, Lifecycle
from roseinfer.server.supervisor import Supervisor


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


def test_phases() -> None:
    lifecycle = Lifecycle(2, ManualClock())
    assert code(lifecycle) == "loading"
    lifecycle.ready()
    assert code(lifecycle) is None
    lifecycle.begin_drain()
    assert code(lifecycle) == "draining"
    lifecycle.ready()
    assert code(lifecycle) == "draining", "there is no way back"


def test_room_is_counted_in_prompts() -> None:
    lifecycle = Lifecycle(4, ManualClock())
    lifecycle.ready()
    with lifecycle.ticket() as ticket:
        lifecycle.grow(ticket, 3)
        assert code(lifecycle) is None
        with lifecycle.ticket():
            assert (lifecycle.requests, lifecycle.prompts) == (2, 4)
            assert code(lifecycle) == "queue_full"
        assert code(lifecycle) is None
    with pytest.raises(ZeroDivisionError), lifecycle.ticket():
        raise ZeroDivisionError
    assert (lifecycle.requests, lifecycle.prompts) == (0, 0)


def test_nothing_starts_after_the_stop() -> None:
    lifecycle = Lifecycle(4, ManualClock())
    cause = unavailable("draining", "bye", 1.0)
    assert lifecycle.stop(cause) == 0
    with pytest.raises(ApiError, match="bye"), lifecycle.live(Supervisor()):
        raise AssertionError("must not be reached")


async def never() -> None:
    await asyncio.Event().wait()


async def silence() -> Message:
    await never()
    raise AssertionError


async def gone() -> Message:
    return {"type": "http.disconnect"}


def test_supervisor_ends_with_the_work() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(Supervisor().run(work(), silence))


def test_supervisor_notices_the_client_leaving() -> None:
    with pytest.raises(ClientDisconnect):
        asyncio.run(Supervisor().run(never(), gone))


@pytest.mark.parametrize("early", [True, False])
def test_supervisor_is_interrupted(early: bool) -> None:
    async def main() -> None:
        supervisor = Supervisor()
        if early:
            supervisor.interrupt(ValueError("first"))
        else:
            asyncio.get_running_loop().call_soon(supervisor.interrupt, ValueError("first"))
            asyncio.get_running_loop().call_soon(supervisor.interrupt, KeyError("second"))
        await supervisor.run(never(), silence)

    with pytest.raises(ValueError, match="first"):
        asyncio.run(main())


def test_cancelling_the_supervisor_cancels_the_work() -> None:
    async def main() -> list[str]:
        ends = []

        async def work() -> None:
            try:
                await never()
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

        task = asyncio.create_task(Supervisor().run(work(), silence))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ends

    assert asyncio.run(main()) == ["cancelled"]
