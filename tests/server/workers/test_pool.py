"""Workers that die, hang or cannot be started. `tests/processes` tests restart limits and ages of heartbeats."""

import asyncio
import errno
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.core.clock import ManualClock
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.processes.child import ErrorReport
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.server.request.slo_classes import SloClasses
from roseinfer.server.workers import launch as launch_module
from roseinfer.server.workers import pool as module
from roseinfer.server.workers.counters import WORKER_ROWS, Count
from roseinfer.server.workers.launch import WorkerProcess, launch_worker
from roseinfer.server.workers.messages import (
    DrainWorker,
    FromManager,
    FromWorker,
    Serving,
    Stop,
    WorkerBoot,
    WorkerFailed,
    WorkerModel,
)
from roseinfer.server.workers.pool import WorkerPool, WorkersDiedError

TIMEOUT_S = 30.0
NO_MEMORY = OSError(errno.ENOMEM, "fork")


class Callbacks:
    """Callbacks that record the numbers of workers."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.late: list[int] = []

    def on_serving(self, worker: WorkerProcess) -> None:
        pass

    def on_up(self, worker: WorkerProcess) -> None:
        pass

    def on_late(self, worker: WorkerProcess) -> None:
        if worker.late:
            self.late.append(worker.number)

    def on_message(self, worker: WorkerProcess, message: FromWorker) -> None:
        raise AssertionError("no other message is sent")

    def on_end(self, worker: WorkerProcess) -> None:
        self.ended.append(worker.number)


class FakeChild:
    """A process that ends when it is killed."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            self._ended.set_result(-9)


class FakeWorker(WorkerProcess):
    """A worker without a process, which records messages and stops when it is told to."""

    received: list[FromManager]

    def send(self, message: FromManager) -> None:
        self.received.append(message)
        if isinstance(message, Stop):
            self.child.kill()

    def close(self) -> None:
        pass


class FakeLauncher:
    """Launches fake workers. `fails(attempt)`: an attempt raises. `hold`: attempts wait for it."""

    def __init__(self, fails: Callable[[int], bool] = lambda attempt: False) -> None:
        self.attempts = 0
        self.workers: list[FakeWorker] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self._fails = fails

    async def launch(
        self, index: int, number: int, on_message: Callable[[WorkerProcess, FromWorker], None]
    ) -> WorkerProcess:
        self.attempts += 1
        attempt = self.attempts
        await self.hold.wait()
        if self._fails(attempt):
            raise NO_MEMORY
        worker = FakeWorker(index, number, None)  # type: ignore[arg-type]
        worker.received = []
        worker.child = FakeChild()  # type: ignore[assignment]
        worker.up = True
        self.workers.append(worker)
        asyncio.get_running_loop().call_soon(on_message, worker, Serving())
        return worker


class Scene:
    """A pool over a launcher. Workers whose index is in `hanging` have no heartbeat."""

    def __init__(self, folder: Path, launcher: Any, size: int = 1) -> None:
        self.callbacks = Callbacks()
        self.launcher = launcher
        self.hanging: set[int] = set()
        self.restarts_enabled = True
        self.counters = SharedRows.create(folder / "counters", WORKER_ROWS, size)
        self.pool = WorkerPool(
            size,
            lambda *given: launcher.launch(*given),
            self.callbacks,
            lambda: self.restarts_enabled,
            self.counters,
            TIMEOUT_S,
            ManualClock(),
        )

    async def beat(self) -> None:
        while True:
            for index in set(range(self.counters.rows)) - self.hanging:
                self.counters.add(index, Count.BEATS, 1)
            await asyncio.sleep(0.001)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.002)

    async def failure(self) -> str:
        async with asyncio.timeout(60):
            with pytest.raises(WorkersDiedError) as raised:
                await self.pool.failure
        return str(raised.value)


Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return a function that runs a scene: `play(act, launcher, size)`. The launcher is made in the event loop."""
    monkeypatch.setattr(module, "LAUNCH_DELAYS_S", (0.01, 0.02))
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.01)

    def run(act: Callable[[Scene], Awaitable[None]], make: Callable[[], Any] = FakeLauncher, *, size: int = 1) -> None:
        async def main() -> None:
            scene = Scene(tmp_path, make(), size)
            beating = asyncio.create_task(scene.beat())
            try:
                await act(scene)
            finally:
                await scene.pool.stop()
                beating.cancel()
                assert scene.pool.workers == {}

        asyncio.run(main())

    return run


# --- deaths -------------------------------------------------------------------------------------------------------
def test_too_many_deaths_of_all_workers_together_end_the_server(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        for death in range(module.LIMITS.max_deaths):
            await scene.until(lambda death=death: len(scene.launcher.workers) == 2 + death)
            scene.launcher.workers[-1].child.kill()
        assert await scene.failure() == "5 API workers have died within 60 seconds"
        assert scene.callbacks.ended == [2, 3, 4, 5, 6], "each worker has a number of its own"

    play(act, size=2)


def test_without_restarts_the_death_of_the_last_worker_ends_the_server(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.restarts_enabled = False
        scene.launcher.workers[0].child.kill()
        assert await scene.failure() == "the last API worker has died"
        assert scene.pool.workers == {} and scene.callbacks.ended == [1]

    play(act)


def test_a_worker_that_reports_an_error_at_the_start_ends_the_server_with_it(play: Play) -> None:
    class FailingLauncher(FakeLauncher):
        async def launch(self, index: int, number: int, on_message: Any) -> WorkerProcess:
            worker = await super().launch(index, number, lambda worker, message: None)
            worker.up = False
            failed = WorkerFailed(ErrorReport.of(ConfigError("invalid template")))
            asyncio.get_running_loop().call_soon(on_message, worker, failed)
            return worker

    async def act(scene: Scene) -> None:
        starting = asyncio.create_task(scene.pool.start())
        with pytest.raises(ConfigError, match="invalid template"):
            await scene.pool.failure
        starting.cancel()

    play(act, FailingLauncher)


def test_the_reason_why_a_worker_cannot_be_restarted_is_logged(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    class FailingLauncher(FakeLauncher):
        async def launch(self, index: int, number: int, on_message: Any) -> WorkerProcess:
            worker = await super().launch(index, number, on_message)
            if number > 1:
                failed = WorkerFailed(ErrorReport.of(ConfigError("the tokenizer is missing")))
                asyncio.get_running_loop().call_soon(on_message, worker, failed)
            return worker

    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.launcher.workers[0].child.kill()
        assert "5 API workers have died" in await scene.failure()

    play(act, FailingLauncher)
    assert "API worker 0 cannot start: the tokenizer is missing" in caplog.text


def test_an_unexpected_error_of_the_supervisor_ends_the_server(play: Play) -> None:
    async def act(scene: Scene) -> None:
        async def fail(*args: Any) -> WorkerProcess:
            raise RuntimeError("a bug")

        await scene.pool.start()
        scene.launcher.launch = fail
        scene.launcher.workers[0].child.kill()
        with pytest.raises(RuntimeError, match="a bug"):
            async with asyncio.timeout(30):
                await scene.pool.failure

    play(act)


# --- launches that fail -------------------------------------------------------------------------------------------
def test_a_server_that_cannot_start_its_workers_fails(play: Play) -> None:
    async def act(scene: Scene) -> None:
        with pytest.raises(WorkersDiedError, match="cannot start an API worker: Cannot allocate memory"):
            await scene.pool.start()

    play(act, lambda: FakeLauncher(lambda attempt: attempt == 2), size=2)


def test_failed_launches_are_retried_while_other_workers_are_left(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.launcher.workers[0].child.kill()
        await scene.until(lambda: len(scene.pool.workers) == 2 and scene.launcher.attempts >= 10)
        assert {worker.number for worker in scene.pool.workers.values()} == {2, 10}
        assert not scene.pool.failure.done()

    play(act, lambda: FakeLauncher(lambda attempt: 2 < attempt < 10), size=2)


def test_failed_launches_end_the_server_if_no_worker_is_left(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.launcher.workers[0].child.kill()
        assert await scene.failure() == "no API worker is left, and none can be started: Cannot allocate memory"
        assert scene.launcher.attempts == 1 + module.MAX_FAILED_LAUNCHES_COUNT

    play(act, lambda: FakeLauncher(lambda attempt: attempt > 1))


def test_stopping_does_not_wait_for_the_next_launch(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAUNCH_DELAYS_S", (3600.0,))

    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.launcher.workers[0].child.kill()
        await scene.until(lambda: scene.launcher.attempts == 2)
        async with asyncio.timeout(30):
            await scene.pool.stop()

    play(act, lambda: FakeLauncher(lambda attempt: attempt > 1))


def test_stopping_does_not_wait_for_a_worker_that_still_imports(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 3600.0)

    class ImportingLauncher(FakeLauncher):
        async def launch(self, index: int, number: int, on_message: Any) -> WorkerProcess:
            worker = await super().launch(index, number, lambda worker, message: None)
            worker.up = False
            worker.send = lambda message: None
            return worker

    async def act(scene: Scene) -> None:
        starting = asyncio.create_task(scene.pool.start())
        await scene.until(lambda: len(scene.pool.workers) == 2)
        async with asyncio.timeout(TIMEOUT_S):
            await scene.pool.stop()
        starting.cancel()

    play(act, ImportingLauncher, size=2)
    assert not caplog.records


def boot(index: int, number: int, control: int, connections: int) -> WorkerBoot:
    return WorkerBoot(
        models=[
            WorkerModel(
                config=ServerConfig(log_level="error"),
                replicas=ReplicasConfig(),
                model_name="none",
                tokenizer="none",
                engines=EngineAddresses(["none"], "none"),
                first_engine=0,
                record=None,
                max_inflight=None,
                counters="none",
            )
        ],
        slo_classes=SloClasses(),
        response_file=None,
        index=index,
        number=number,
        workers=1,
        control=control,
        connections=connections,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
def test_a_failed_launch_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*args: Any, **options: Any) -> None:
        raise NO_MEMORY

    monkeypatch.setattr(launch_module, "launch", no_process)

    async def main() -> None:
        gc.collect()  # what other tests have left
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with pytest.raises(OSError, match="fork"):
                await launch_worker(boot, 0, 1, lambda worker, message: None)
            await asyncio.sleep(0.01)
        assert os.listdir("/proc/self/fd") == before

    asyncio.run(main())


# --- messages during a launch -------------------------------------------------------------------------------------
async def drain(scene: Scene) -> None:
    scene.pool.drain()


async def stop(scene: Scene) -> None:
    await scene.pool.stop()


@pytest.mark.parametrize(("send", "message"), [(drain, DrainWorker), (stop, Stop)])
def test_a_worker_gets_messages_that_were_sent_while_it_was_launched(
    play: Play, send: Callable[[Scene], Coroutine[Any, Any, None]], message: type[FromManager]
) -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        scene.launcher.hold.clear()
        scene.launcher.workers[0].child.kill()
        await scene.until(lambda: scene.launcher.attempts == 2)
        sending = asyncio.create_task(send(scene))
        await asyncio.sleep(0.01)
        scene.launcher.hold.set()
        await scene.until(lambda: len(scene.launcher.workers) == 2)
        await scene.until(lambda: any(isinstance(received, message) for received in scene.launcher.workers[1].received))
        await sending

    play(act)


# --- hangs --------------------------------------------------------------------------------------------------------
def test_a_worker_that_hangs_is_reported_late_then_killed_and_restarted(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.start()
        await scene.until(lambda: all(worker.serving for worker in scene.pool.workers.values()))
        scene.hanging.add(0)
        await scene.until(lambda: scene.callbacks.late == [1])
        assert scene.callbacks.ended == []
        await scene.until(lambda: scene.callbacks.ended == [1])
        scene.hanging.clear()
        await scene.until(lambda: sorted(w.number for w in scene.pool.workers.values()) == [2, 3])
        assert scene.callbacks.late == [1]

    play(act, size=2)


def test_a_worker_that_starts_has_longer(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentLauncher(FakeLauncher):
        async def launch(self, index: int, number: int, on_message: Any) -> WorkerProcess:
            return await super().launch(index, number, lambda worker, message: None)

    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.001)

    async def act(scene: Scene) -> None:
        scene.hanging.add(0)
        await scene.pool.start()
        worker = scene.launcher.workers[0]
        checks = 0

        def count(*args: Any) -> int:
            nonlocal checks
            checks += 1
            return 0

        scene.counters.get = count  # type: ignore[method-assign]
        await scene.until(lambda: worker.timed_out)
        assert checks * 0.25 > module.START_TIMEOUT_S - 1 and scene.callbacks.late == []

    play(act, SilentLauncher)
