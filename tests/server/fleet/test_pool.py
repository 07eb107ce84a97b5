"""Workers that cannot live."""

import asyncio
from collections.abc import Callable

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.config import ServerConfig
from roseinfer.server.fleet import pool as module
from roseinfer.server.fleet.control import FromWorker, WorkerBoot
from roseinfer.server.fleet.pool import WorkerPool, WorkerProcess, WorkersDiedError
from roseinfer.server.request.slo_classes import SloClasses

NO_COUNTERS = 2**15  # no such descriptor: a worker that is told of it ends at once


class Audience:
    def __init__(self) -> None:
        self.ended: list[int] = []

    def serving(self, worker: WorkerProcess) -> None:
        raise AssertionError("it cannot serve")

    def received(self, worker: WorkerProcess, message: FromWorker) -> None:
        raise AssertionError("it has nothing to say")

    def gone(self, worker: WorkerProcess) -> None:
        self.ended.append(worker.number)


def boot(index: int, number: int, control: int, connections: int) -> WorkerBoot:
    return WorkerBoot(
        config=ServerConfig(log_level="error"),
        slo_classes=SloClasses(),
        model_name="none",
        tokenizer="none",
        engine="none",
        max_inflight=None,
        index=index,
        number=number,
        workers=1,
        control=control,
        connections=connections,
        counters=NO_COUNTERS,
    )


def make(audience: Audience, replacing: Callable[[], bool]) -> WorkerPool:
    return WorkerPool(1, boot, 0, audience, replacing, ManualClock())


def test_workers_that_die_as_fast_as_they_are_replaced_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DEATHS", 3)

    async def main() -> list[int]:
        audience = Audience()
        pool = make(audience, lambda: True)
        starting = asyncio.create_task(pool.start())
        async with asyncio.timeout(60):
            with pytest.raises(WorkersDiedError, match="3 API workers have died within 60 seconds"):
                await pool.failure
        starting.cancel()
        await pool.stop()
        return audience.ended

    assert asyncio.run(main()) == [1, 2, 3], "each replacement has a number of its own"


def test_when_nobody_is_replaced_the_last_one_ends_the_server() -> None:
    async def main() -> None:
        audience = Audience()
        pool = make(audience, lambda: False)
        starting = asyncio.create_task(pool.start())
        async with asyncio.timeout(60):
            with pytest.raises(WorkersDiedError, match="the last API worker has died"):
                await pool.failure
        assert pool.workers == {} and audience.ended == [1]
        starting.cancel()
        await pool.stop()

    asyncio.run(main())
