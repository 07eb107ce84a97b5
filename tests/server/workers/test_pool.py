"""Workers that cannot live, that hang, or that cannot even be started."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.core.clock import ManualClock
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.server.request.slo_classes import SloClasses
from roseinfer.server.workers import pool as module
from roseinfer.server.workers.control import Drain, FromManager, FromWorker, Serving, Stop, WorkerBoot
from roseinfer.server.workers.heartbeat import Silence
from roseinfer.server.workers.launch import Launcher, WorkerProcess
from roseinfer.server.workers.pool import WorkerPool, WorkersDiedError

NO_COUNTERS = 2**15  # no such descriptor: a worker that is told of it ends at once
NO_MEMORY = OSError(errno.ENOMEM, "fork")


class Audience:
    def __init__(self) -> None:
        self.ended: list[int] = []
        self.fell_quiet: list[int] = []

    def serving(self, worker: WorkerProcess) -> None:
        pass

    def up(self, worker: WorkerProcess) -> None:
        pass

    def quiet(self, worker: WorkerProcess) -> None:
        if worker.quiet:
            self.fell_quiet.append(worker.number)

    def received(self, worker: WorkerProcess, message: FromWorker) -> None:
        raise AssertionError("it has nothing to say")

    def gone(self, worker: WorkerProcess) -> None:
        self.ended.append(worker.number)


class FakeWorker(WorkerProcess):
    """A process that does nothing, and what it was told."""

    heard: list[FromManager]

    def send(self, message: FromManager) -> None:
        self.heard.append(message)
        if isinstance(message, Stop):
            self.kill()

    def close(self) -> None:
        pass


class FakeLauncher:
    """Starts processes that sleep; the attempts whose numbers are in `failing` fail. `hold`: attempts wait for it."""

    def __init__(self, failing: Callable[[int], bool] = lambda attempt: False) -> None:
        self.attempts = 0
        self.started: list[FakeWorker] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self._failing = failing

    async def launch(
        self, index: int, number: int, on_message: Callable[[WorkerProcess, FromWorker], None]
    ) -> WorkerProcess:
        self.attempts += 1
        attempt = self.attempts
        await self.hold.wait()
        if self._failing(attempt):
            raise NO_MEMORY
        worker = FakeWorker(index, number, None)  # type: ignore[arg-type]
        worker.heard = []
        worker.process = await asyncio.create_subprocess_exec("sleep", "600")
        worker.up = True
        self.started.append(worker)
        asyncio.get_running_loop().call_soon(on_message, worker, Serving())
        return worker


class Beats:
    """Heartbeats by script: the numbers of the workers that do not move."""

    def __init__(self) -> None:
        self.stopped: dict[int, float] = {}

    def look(self, index: int, number: int, serving: bool) -> Silence:
        seconds = self.stopped.get(number, 0.0)
        return Silence(seconds, quiet=seconds > 1, hung=seconds > 30)


class Scene:
    def __init__(self, launcher: Any, size: int = 1) -> None:
        self.audience = Audience()
        self.launcher = launcher
        self.beats = Beats()
        self.replacing = True
        self.pool = WorkerPool(
            size,
            launcher,
            self.audience,
            lambda: self.replacing,
            self.beats,
            ManualClock(),  # type: ignore[arg-type]
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)

    async def failure(self) -> str:
        async with asyncio.timeout(60):
            with pytest.raises(WorkersDiedError) as raised:
                await self.pool.failure
        return str(raised.value)


def play(make: Callable[[], Scene], act: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = make()
        try:
            await act(scene)
        finally:
            await scene.pool.stop()
            assert scene.pool.workers == {}

    asyncio.run(main())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", (0.01, 0.02))
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)


# --- real processes that end at once ------------------------------------------------------------------------------
def boot(index: int, number: int, control: int, connections: int) -> WorkerBoot:
    return WorkerBoot(
        config=ServerConfig(log_level="error"),
        slo_classes=SloClasses(),
        model_name="none",
        tokenizer="none",
        replicas=ReplicasConfig(),
        engines=EngineAddresses(["none"], "none"),
        record=None,
        response_file=None,
        max_inflight=None,
        index=index,
        number=number,
        workers=1,
        control=control,
        connections=connections,
        counters=NO_COUNTERS,
    )


def test_workers_that_die_as_fast_as_they_are_replaced_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DEATHS", 3)

    async def act(scene: Scene) -> None:
        starting = asyncio.create_task(scene.pool.start())
        assert await scene.failure() == "3 API workers have died within 60 seconds"
        starting.cancel()
        assert scene.audience.ended == [1, 2, 3], "each replacement has a number of its own"

    play(lambda: Scene(Launcher(boot, 0)), act)


def test_when_nobody_is_replaced_the_last_one_ends_the_server() -> None:
    async def act(scene: Scene) -> None:
        scene.replacing = False
        starting = asyncio.create_task(scene.pool.start())
        assert await scene.failure() == "the last API worker has died"
        assert scene.pool.workers == {} and scene.audience.ended == [1]
        starting.cancel()

    play(lambda: Scene(Launcher(boot, 0)), act)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
def test_an_attempt_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_process(*args: Any, **options: Any) -> None:
        raise NO_MEMORY

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)

    async def main() -> None:
        launcher = Launcher(boot, 0)
        before = open_descriptors()
        for _ in range(3):
            with pytest.raises(OSError, match="fork"):
                await launcher.launch(0, 1, lambda worker, message: None)
            await asyncio.sleep(0.01)
        assert open_descriptors() == before

    asyncio.run(main())


# --- no process to be had -----------------------------------------------------------------------------------------
def test_a_server_that_cannot_start_its_workers_says_so() -> None:
    async def act(scene: Scene) -> None:
        with pytest.raises(WorkersDiedError, match="cannot start an API worker: Cannot allocate memory"):
            await scene.pool.start()

    play(lambda: Scene(FakeLauncher(lambda attempt: attempt == 2), size=2), act)


def test_it_is_tried_again_while_others_are_left() -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.launcher.started[0].kill()
        await scene.until(lambda: len(scene.pool.workers) == 2 and scene.launcher.attempts >= 10)
        assert {worker.number for worker in scene.pool.workers.values()} == {2, 10}
        assert not scene.pool.failure.done()

    play(lambda: Scene(FakeLauncher(lambda attempt: 2 < attempt < 10), size=2), act)


def test_when_none_is_left_and_none_can_be_had_the_server_ends() -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.launcher.started[0].kill()
        assert await scene.failure() == "no API worker is left, and none can be started: Cannot allocate memory"
        assert scene.launcher.attempts == 1 + module.MAX_FAILURES_ALONE

    play(lambda: Scene(FakeLauncher(lambda attempt: attempt > 1)), act)


def test_a_server_that_is_stopped_waits_for_no_further_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", (3600.0,))

    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.launcher.started[0].kill()
        await scene.until(lambda: scene.launcher.attempts == 2)
        async with asyncio.timeout(30):
            await scene.pool.stop()

    play(lambda: Scene(FakeLauncher(lambda attempt: attempt > 1)), act)


def test_an_unexpected_failure_of_the_watch_is_not_nobodys() -> None:
    async def act(scene: Scene) -> None:
        async def fail(*args: Any) -> WorkerProcess:
            raise RuntimeError("a bug")

        await scene.pool.start()
        scene.launcher.launch = fail
        scene.launcher.started[0].kill()
        with pytest.raises(RuntimeError, match="a bug"):
            async with asyncio.timeout(30):
                await scene.pool.failure

    play(lambda: Scene(FakeLauncher()), act)


# --- told in time -------------------------------------------------------------------------------------------------
def while_one_is_started(tell: Callable[[Scene], Coroutine[Any, Any, None]], told: type[FromManager]) -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.launcher.hold.clear()
        scene.launcher.started[0].kill()
        await scene.until(lambda: scene.launcher.attempts == 2)
        telling = asyncio.create_task(tell(scene))
        await asyncio.sleep(0.01)
        scene.launcher.hold.set()
        await scene.until(lambda: len(scene.launcher.started) == 2)
        await scene.until(lambda: any(isinstance(message, told) for message in scene.launcher.started[1].heard))
        await telling

    play(lambda: Scene(FakeLauncher()), act)


def test_a_worker_that_was_being_started_when_the_drain_began_is_told() -> None:
    async def drain(scene: Scene) -> None:
        scene.pool.drain()

    while_one_is_started(drain, Drain)


def test_a_worker_that_was_being_started_when_all_were_stopped_is_told() -> None:
    async def stop(scene: Scene) -> None:
        await scene.pool.stop()

    while_one_is_started(stop, Stop)


# --- hung ---------------------------------------------------------------------------------------------------------
def test_a_hung_worker_is_killed_and_replaced_a_quiet_one_is_reported() -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        await scene.until(lambda: all(worker.serving for worker in scene.pool.workers.values()))
        os.kill(scene.launcher.started[0].process.pid, signal.SIGSTOP)
        scene.beats.stopped[1] = 1.5
        await scene.until(lambda: scene.audience.fell_quiet == [1])
        assert scene.audience.ended == []
        scene.beats.stopped[1] = 31.0
        await scene.until(lambda: scene.audience.ended == [1])
        await scene.until(lambda: sorted(w.number for w in scene.pool.workers.values()) == [2, 3])

    play(lambda: Scene(FakeLauncher(), size=2), act)
