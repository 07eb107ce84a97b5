"""Queue of text work, with work that ends when a test releases it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from roseinfer.server.http.errors import ApiError, draining
from roseinfer.server.text_work.lane import Lane

DRAINING = draining()


class Works:
    """Jobs that have started, by name, each of which runs until it is released or cancelled."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def work(self, name: str) -> str:
        self.started.append(name)
        end = self.ends[name] = asyncio.Event()
        try:
            await end.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return name

    async def release(self, name: str) -> None:
        self.ends[name].set()
        await settled()


class Queue:
    def __init__(self, runners: int = 1, max_size: int = 100, **options: Any) -> None:
        self.works = Works()
        self.refused = 0
        self.lane = Lane(runners, max_size, self._on_refused, **options)

    def _on_refused(self) -> None:
        self.refused += 1

    async def submit(self, name: str, size: int = 10) -> "asyncio.Task[str]":
        task = asyncio.create_task(self.lane.run(size, lambda: asyncio.ensure_future(self.works.work(name))))
        await settled()
        return task


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_jobs_run_in_order() -> None:
    async def test() -> None:
        queue = Queue(runners=2)
        tasks = [await queue.submit(name) for name in "abcd"]
        assert queue.works.started == ["a", "b"] and queue.lane.size == 40
        await queue.works.release("b")
        await queue.works.release("a")
        assert queue.works.started == ["a", "b", "c", "d"]
        await queue.works.release("c")
        await queue.works.release("d")
        assert [await task for task in tasks] == ["a", "b", "c", "d"]
        assert queue.lane.size == 0

    run(test())


def test_the_size_is_bounded_but_one_job_is_always_admitted() -> None:
    async def test() -> None:
        queue = Queue(max_size=100)
        large = await queue.submit("large", 1000)
        refused = await queue.submit("refused", 1)
        with pytest.raises(ApiError) as caught:
            await refused
        assert (caught.value.status, caught.value.code) == (503, "text_queue_full")
        assert caught.value.retry_after_s is not None and queue.refused == 1
        await queue.works.release("large")
        assert await large == "large"
        await queue.submit("next")
        assert queue.works.started == ["large", "next"]

    run(test())


def test_a_cancelled_waiting_job_frees_its_place() -> None:
    async def test() -> None:
        queue = Queue()
        await queue.submit("a")
        left, stays = await queue.submit("left"), await queue.submit("stays")
        left.cancel()
        await settled()
        assert queue.lane.size == 20
        await queue.works.release("a")
        assert queue.works.started == ["a", "stays"]
        await queue.works.release("stays")
        assert await stays == "stays"

    run(test())


def test_a_job_cancelled_at_its_turn_passes_it_on() -> None:
    async def test() -> None:
        queue = Queue()
        await queue.submit("a")
        left = await queue.submit("left")
        await queue.submit("b")
        queue.works.ends["a"].set()
        while queue.lane.size == 30:  # until a's end has given the turn, and no further
            await asyncio.sleep(0)
        left.cancel()
        await settled()
        assert queue.works.started == ["a", "b"] and queue.lane.size == 10

    run(test())


@pytest.mark.parametrize("kills", [True, False])
def test_a_running_job_whose_client_leaves_keeps_its_place_until_it_ends(kills: bool) -> None:
    """A job that can be killed ends at once."""

    async def test() -> None:
        queue = Queue(kills=kills)
        left = await queue.submit("left")
        await queue.submit("next")
        left.cancel()
        await settled()
        assert queue.works.cancelled == (["left"] if kills else [])
        assert queue.works.started == (["left", "next"] if kills else ["left"])
        if not kills:
            await queue.works.release("left")
            assert queue.works.started == ["left", "next"]

    run(test())


def test_a_drain_fails_jobs_that_have_not_started() -> None:
    async def test() -> None:
        queue = Queue()
        running, waiting = await queue.submit("running"), await queue.submit("waiting")
        queue.lane.refuse(DRAINING)
        later = await queue.submit("later")
        for task in (waiting, later):
            with pytest.raises(ApiError) as caught:
                await task
            assert caught.value.code == "draining"
        await queue.works.release("running")
        assert await running == "running" and queue.works.started == ["running"]

    run(test())


def test_the_time_limit_of_a_job_includes_its_wait() -> None:
    async def test() -> None:
        queue = Queue(max_s=0.01, kills=True)
        running, waiting = await queue.submit("running"), await queue.submit("waiting")
        for task in (running, waiting):
            with pytest.raises(ApiError) as caught:
                await task
            assert caught.value.code == "text_queue_full"
        await settled()
        assert queue.works.cancelled[:1] == ["running"] and queue.lane.size == 0

    run(test())
