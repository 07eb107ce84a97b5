"""A child that ends is restarted with growing pauses, given up after many deaths, and restarted on request."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.processes.supervise import (
    BackgroundTasks,
    RestartLimits,
    RestartLoop,
    Restarts,
    finish,
    rolling_restart,
    until,
)

LIMITS = RestartLimits(max_deaths=5, window_s=60.0, delays_s=(0.0, 0.5, 1.0, 2.0))
log = logging.getLogger("tests.supervise")


def test_pauses_grow_until_a_process_has_served_for_long() -> None:
    clock = ManualClock()
    restarts = Restarts(clock, LIMITS)
    delays = []
    for _ in range(6):
        clock.advance(20)  # it loads for long, which is not service
        delays.append(restarts.died())
    assert delays == [0.0, 0.5, 1.0, 2.0, 2.0, 2.0]
    for seconds in (59.0, 60.0):
        clock.advance(seconds)
        restarts.served(seconds)
        delays.append(restarts.died())
    assert delays[6:] == [2.0, 0.0] and restarts.deaths == 8


def test_five_deaths_within_a_minute_are_too_many() -> None:
    clock = ManualClock()
    restarts = Restarts(clock, LIMITS)
    for _ in range(4):
        assert restarts.died() is not None
        clock.advance(15)
    assert restarts.died() is None, "the first was 60 s ago"
    clock.advance(15.1)
    assert restarts.died() == 2.0, "the first of the last five was longer ago"
    assert restarts.died() is None
    restarts.forgive()
    assert restarts.died() == 0.0


@dataclass
class Child:
    """A child by script. `results`: how its runs end, one after the other; the last one waits to be replaced."""

    results: list[Exception | None]
    comes_up: bool = True
    load_s: float = 0.0
    serve_s: float = 0.0
    delays_s: tuple[float, ...] = (0.0, 0.001)
    runs: int = 0
    deaths: list[tuple[str, float | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        limits = RestartLimits(max_deaths=3, delays_s=self.delays_s)
        self.restarts = Restarts(self.clock, limits)
        self.loop = RestartLoop(self.run_once, self.restarts, self.clock, self.died)

    async def run_once(self, number: int) -> Exception | None:
        self.runs += 1
        assert number == self.runs
        self.clock.advance(self.load_s)
        if self.comes_up:
            self.loop.came_up()
        self.clock.advance(self.serve_s)
        if not self.results:
            await self.loop.restart_requested.wait()
            return None
        return self.results.pop(0)

    def died(self, error: Exception, delay_s: float | None) -> None:
        self.deaths.append((str(error), delay_s))


def play(child: Child, act: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        running = asyncio.create_task(child.loop.run())
        try:
            async with asyncio.timeout(30):
                await act()
        finally:
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(main())


def reach(condition: Callable[[], bool]) -> Awaitable[bool]:
    return until(condition, poll_s=0.001)


def test_a_child_is_run_again_after_each_death() -> None:
    async def act() -> None:
        await reach(lambda: child.runs == 3)
        assert child.deaths == [("a", 0.0), ("b", 0.001)] and not child.loop.given_up

    child = Child([OSError("a"), OSError("b")])
    play(child, act)


@pytest.mark.parametrize(("load_s", "serve_s", "delays"), [(90, 30, (0.0, 0.001)), (0, 60, (0.0, 0.0))])
def test_pauses_begin_again_after_long_service_but_not_after_a_long_start(
    load_s: float, serve_s: float, delays: tuple[float, ...]
) -> None:
    async def act() -> None:
        await reach(lambda: child.runs == 3)
        assert tuple(delay_s for _, delay_s in child.deaths) == delays

    child = Child([OSError("a"), OSError("b")], load_s=load_s, serve_s=serve_s)
    play(child, act)


def test_a_child_that_was_replaced_on_purpose_has_not_died() -> None:
    async def act() -> None:
        for runs in range(1, 8):
            await reach(lambda runs=runs: child.runs == runs)
            child.loop.restart_now()
        assert child.deaths == [] and child.restarts.deaths == 0

    child = Child([])
    play(child, act)


def test_a_child_that_never_came_up_raises_its_first_error() -> None:
    child = Child([OSError("no memory")], comes_up=False)
    with pytest.raises(OSError, match="no memory"):
        asyncio.run(child.loop.run())
    assert child.runs == 1 and child.deaths == []


def test_a_child_that_was_given_up_runs_again_on_request_only() -> None:
    async def act() -> None:
        await reach(lambda: child.loop.given_up)
        assert child.deaths[-1] == ("c", None)
        await asyncio.sleep(0.02)
        assert child.runs == 3
        child.loop.restart_now()
        await reach(lambda: child.runs == 5)
        assert not child.loop.given_up and child.deaths[-1] == ("d", 0.0), "past deaths are forgiven"

    child = Child([OSError("a"), OSError("b"), OSError("c"), OSError("d")])
    play(child, act)


def test_a_request_ends_a_pause() -> None:
    async def act() -> None:
        await reach(lambda: bool(child.deaths))
        assert child.runs == 1
        child.loop.restart_now()
        await reach(lambda: child.runs == 2)

    child = Child([OSError("a")], delays_s=(3600.0,))
    play(child, act)


def test_the_failure_of_a_background_task_is_reported_and_all_can_be_cancelled() -> None:
    async def main() -> None:
        failures: list[BaseException] = []
        tasks = BackgroundTasks(failures.append)

        async def fails() -> None:
            raise RuntimeError("a bug")

        async def spawns() -> None:
            tasks.spawn(fails())

        tasks.spawn(spawns())
        await tasks.join()
        assert [str(error) for error in failures] == ["a bug"]
        waiting = tasks.spawn(asyncio.sleep(3600))  # type: ignore[arg-type]
        await tasks.cancel()
        assert waiting.cancelled() and len(failures) == 1

    asyncio.run(main())


def test_work_that_must_finish_outlives_a_cancelled_caller_and_keeps_its_error() -> None:
    async def main() -> None:
        done = asyncio.Event()

        async def work() -> None:
            await asyncio.sleep(0.05)
            done.set()
            raise ValueError("late")

        caller = asyncio.create_task(finish(work()))
        for _ in range(3):
            await asyncio.sleep(0.005)
            caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert done.is_set()
        with pytest.raises(ValueError, match="late"):
            await finish(work())

    asyncio.run(main())


# --- restart in turn ----------------------------------------------------------------------------------------------
@dataclass
class Server:
    """One of several that are restarted in turn."""

    name: str
    events: list[str]
    serving: bool = True
    given_up: bool = False
    comes_back: bool = True

    async def restart(self, others_serve: Callable[[], bool]) -> bool:
        self.events.append(f"{self.name} down, others serve: {others_serve()}")
        self.serving = False
        await asyncio.sleep(0)
        self.serving, self.given_up = self.comes_back, not self.comes_back
        return self.comes_back


def servers(*names: str) -> tuple[list[Server], list[str]]:
    events: list[str] = []
    return [Server(name, events) for name in names], events


def test_children_are_restarted_one_after_the_other_while_another_serves() -> None:
    async def main() -> None:
        children, events = servers("a", "b", "c")
        children[1].serving = children[2].serving = False
        rolling = asyncio.create_task(rolling_restart(children, log, poll_s=0.001))
        await asyncio.sleep(0.02)
        assert events == [], "a is the only one that serves"
        children[2].serving = True
        await rolling
        assert events == [f"{name} down, others serve: True" for name in "abc"]

    asyncio.run(main())


def test_the_first_that_does_not_come_back_ends_a_rolling_restart(caplog: pytest.LogCaptureFixture) -> None:
    children, events = servers("a", "b", "c")
    children[1].comes_back = False
    asyncio.run(rolling_restart(children, log, poll_s=0.001))
    assert len(events) == 2 and "b does not come back: the rolling restart stops here" in caplog.text


def test_a_single_child_is_restarted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for others in ([], [Server("b", [], serving=False, given_up=True, comes_back=False)]):
        children, events = servers("a")
        caplog.clear()
        asyncio.run(rolling_restart([*children, *others], log, poll_s=0.001))
        assert events == ["a down, others serve: True"]
        assert "no other engine serves: requests are rejected until a is back" in caplog.text
