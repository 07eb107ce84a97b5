"""Engines that die, hang, fail to start, and restart one after the other, with scripted processes."""

import asyncio
import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cluster import supervisor as module
from roseinfer.cluster.devices import EngineSpec
from roseinfer.cluster.engine_rows import EngineRows
from roseinfer.cluster.status import EngineStatus
from roseinfer.cluster.supervised_engine import SETTLED_STEPS, SupervisorTimes
from roseinfer.cluster.supervisor import EngineSupervisor
from roseinfer.core.clock import ManualClock
from roseinfer.core.config.engine import EngineConfig, ProfileConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.errors import ConfigError, EngineDeadError, ResourceError
from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.promise import Promise
from roseinfer.core.step_cost import StepCost
from roseinfer.engine.api import EngineInfo, EngineState, StepRecord
from roseinfer.engine.messages import ClientMessage, DrainEngine, Failed, Heartbeat
from roseinfer.engine.process_transport import EngineLaunch
from roseinfer.engine.transport import OnDeath, OnMessage
from roseinfer.processes.heartbeat import ProcessStats
from roseinfer.processes.supervise import RestartLimits
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams
from tests.helpers.engine_info import changed
from tests.helpers.model_engine import INFO

COST = StepCost(1e-3, 2e-5, 3e-6, 4e-9, 2e-5)
LIMITS = RestartLimits(delays_s=(0.0, 0.001, 0.002))
TIMES = SupervisorTimes(LIMITS, check_interval_s=3600.0, settle_s=0.02, poll_s=0.001)  # checks only on request
CHECKING = replace(TIMES, check_interval_s=0.001)


@dataclass
class FakeProcess:
    """Scripted engine. `held`: it loads until this is set, and then starts or `fails`. `stopped`: as by SIGSTOP.

    `stuck`: a kill takes longer than the test.
    """

    settings: EngineLaunch
    number: int  # among all that there were of this engine
    fails: Exception | None = None
    spawn_fails: OSError | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)
    record: str | None = None
    closed: bool = False
    killed: bool = False
    stopped: bool = False
    stuck: bool = False
    stats_fail: bool = False
    sent: list[ClientMessage] = field(default_factory=list)
    asked: int = 0
    info: EngineInfo = INFO
    pid: int | None = None

    def __post_init__(self) -> None:
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._end.set()

    async def launch(self, on_message: OnMessage, on_death: OnDeath) -> None:
        self.say, self._on_death = on_message, on_death
        if self.spawn_fails is not None:
            raise self.spawn_fails

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> EngineInfo:
        held = asyncio.ensure_future(self.held.wait())
        try:
            await asyncio.wait({held, self._dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            held.cancel()
        if self._dead.done():
            raise EngineDeadError(self._dead.result())
        if self.fails is not None:
            raise self.fails
        self.rows = EngineRows.open(self.settings.rows or Path())
        return self.info

    def send(self, message: ClientMessage) -> None:
        self.sent.append(message)

    def beat(self, **stats: int) -> None:
        self.say(Heartbeat(SchedulerStats(**stats), 0.0))

    def step(self, **promise: Any) -> None:
        self.rows.publish(self.settings.index, Promise(0.0, **promise))

    def die(self, reason: str = "it crashed") -> None:
        if not self._dead.done() and not self.closed:
            self._dead.set_result(reason)
            self._on_death(reason)

    def kill(self) -> None:
        self.killed = True
        if not self.stuck:
            self.die("it was killed")

    def stats(self) -> ProcessStats:
        if self.stats_fail:
            raise RuntimeError("a bug")
        return ProcessStats(1.0, self.stopped)

    def request_stack_dumps(self) -> None:
        self.asked += 1

    def stacks(self) -> str:
        return "in a lock" if self.asked else ""

    def slowly(self) -> asyncio.Event:
        """Delay its end until the returned event is set."""
        self._end.clear()
        return self._end

    async def close(self) -> None:
        await self._end.wait()
        self.closed = True


@pytest.fixture(autouse=True)
def folder_of_recordings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder: a restart makes the file that its engine would record to."""
    monkeypatch.chdir(tmp_path)


class Scene:
    """Supervisor of fake processes, `made` in the order of their starts. `script` is called with each new one."""

    def __init__(
        self, engines: int, script: Callable[[FakeProcess], None] | None, drain_s: float, times: SupervisorTimes
    ) -> None:
        self.made: list[FakeProcess] = []
        self.clock = ManualClock(100.0)
        self.up = True  # new processes start at once
        self._script = script
        replicas = ReplicasConfig(replicas=engines, engine_timeout=5.0, drain_timeout=drain_s)
        config = EngineConfig(profile=ProfileConfig(record="run"))
        self.supervisor = EngineSupervisor(
            config, replicas, stall_s=20.0, clock=self.clock, make=self._make, times=times
        )

    def _make(self, config: EngineConfig, folder: Path, settings: EngineLaunch) -> FakeProcess:
        number = sum(other.settings.index == settings.index for other in self.made) + 1
        process = FakeProcess(settings, number, record=config.profile.record)
        if self.up:
            process.held.set()
        if self._script is not None:
            self._script(process)
        self.made.append(process)
        return process

    async def start(self) -> None:
        await self.supervisor.launch()
        await self.supervisor.connect()

    def now(self, engine: int = 0) -> FakeProcess:
        """Return the present process of an engine."""
        return [process for process in self.made if process.settings.index == engine][-1]

    @property
    def states(self) -> list[EngineState]:
        return [report.state for report in self.supervisor.reports()]

    def status(self, engine: int = 0) -> EngineStatus:
        rows = EngineRows.open(self.supervisor.rows_path)
        try:
            return rows.status(engine)
        finally:
            rows.close()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.001)

    async def ready(self, number: int, engine: int = 0) -> FakeProcess:
        """Return the process of that number, once it is up."""
        await self.until(lambda: self.status(engine) == EngineStatus(EngineState.READY, number))
        return self.now(engine)


def play(
    act: Callable[[Scene], Awaitable[None]],
    engines: int = 1,
    script: Callable[[FakeProcess], None] | None = None,
    drain_s: float = 60.0,
    times: SupervisorTimes = TIMES,
) -> None:
    async def main() -> None:
        scene = Scene(engines, script, drain_s, times)
        try:
            await act(scene)
        finally:
            await scene.supervisor.close()
        assert all(process.closed for process in scene.made), "no process is left behind"
        assert not scene.supervisor.folder.exists()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


# --- starting -----------------------------------------------------------------------------------------------------
def test_all_engines_load_at_once_and_the_info_has_the_least_of_each() -> None:
    async def act(scene: Scene) -> None:
        scene.up = False
        await scene.supervisor.launch()
        assert [process.settings.index for process in scene.made] == [0, 1, 2], "at once"
        assert scene.supervisor.addresses == [process.settings.address for process in scene.made]
        connecting = asyncio.create_task(scene.supervisor.connect())
        for process, blocks in zip(scene.made, (64, 32, 48), strict=True):
            assert not connecting.done()
            process.info = changed(INFO, num_blocks=blocks, max_model_len=256 - blocks)
            process.held.set()
            await asyncio.sleep(0.01)
        assert await connecting == changed(INFO, num_blocks=32, max_model_len=192)
        assert scene.states == [EngineState.READY] * 3
        assert [report.info for report in scene.supervisor.reports()] == [process.info for process in scene.made]

    play(act, engines=3)


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        ({"fails": ConfigError("max_model_len is too much")}, ConfigError, "max_model_len is too much"),
        ({"fails": EngineDeadError("code -9")}, EngineDeadError, "code -9"),
        (
            {"spawn_fails": OSError(errno.ENOMEM, "fork")},
            ResourceError,
            "start an engine process: Cannot allocate memory",
        ),
    ],
)
def test_an_engine_that_cannot_start_raises_and_stops_the_others(
    script: dict[str, Any], kind: type[Exception], said: str
) -> None:
    def second_fails(process: FakeProcess) -> None:
        if process.settings.index == 1:
            vars(process).update(script)
        if process.settings.index == 2:
            process.held.clear()

    async def act(scene: Scene) -> None:
        await scene.supervisor.launch()
        with pytest.raises(kind, match=said):
            await scene.supervisor.connect()
        assert all(process.closed for process in scene.made) and len(scene.made) == 3, "none is restarted"

    play(act, engines=3, script=second_fails)


def test_too_few_devices_raise_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: EngineConfig, replicas: ReplicasConfig) -> list[EngineSpec]:
        raise ConfigError("there is 1 GPU")

    monkeypatch.setattr(module, "engine_specs", refuse)

    async def act(scene: Scene) -> None:
        with pytest.raises(ConfigError, match="there is 1 GPU"):
            await scene.supervisor.launch()
        assert scene.made == [] and not scene.supervisor.folder.exists()

    play(act, engines=2)


def test_a_cancelled_start_stops_the_engines_and_keeps_the_files_until_close() -> None:
    async def act(scene: Scene) -> None:
        scene.up = False
        await scene.supervisor.launch()
        connecting = asyncio.create_task(scene.supervisor.connect())
        await asyncio.sleep(0.01)
        connecting.cancel()
        await asyncio.wait({connecting})
        assert connecting.cancelled() and all(process.closed for process in scene.made)
        assert scene.supervisor.rows_path.exists(), "another process of the server may be about to open it"

    play(act, engines=2)


def test_an_unexpected_error_ends_the_start_too() -> None:
    def breaks(process: FakeProcess) -> None:
        process.fails = RuntimeError("a bug") if process.settings.index else None

    async def act(scene: Scene) -> None:
        scene.up = False
        await scene.supervisor.launch()
        scene.now(1).held.set()
        with pytest.raises(RuntimeError, match="a bug"):
            async with asyncio.timeout(30):
                await scene.supervisor.connect()
        assert isinstance(scene.supervisor.failure.exception(), RuntimeError)

    play(act, engines=2, script=breaks)


# --- deaths -------------------------------------------------------------------------------------------------------
def test_an_engine_that_dies_is_restarted_at_once_and_counters_continue() -> None:
    async def act(scene: Scene) -> None:
        heard: list[tuple[int, StepRecord]] = []
        scene.supervisor.on_step(lambda engine, step: heard.append((engine, step)))
        await scene.start()
        other = scene.now(1)
        record = StepRecord(7, 0.01)
        scene.now().say(Heartbeat(SchedulerStats(generation_tokens=5, running=2), 0.0, [record]))
        scene.now().step(steps=3)
        scene.up = False
        scene.now().die()
        await scene.until(lambda: scene.status() == EngineStatus(EngineState.STARTING, 2))
        first, second = scene.made[0], scene.now()
        assert [process.record for process in scene.made] == ["run.0", "run.1", "run.0.2"], "no record is overwritten"
        assert first.closed and not first.killed and second.settings.address == first.settings.address
        report = scene.supervisor.reports()[0]
        assert (report.restarts, report.deaths, report.health.alive, report.health.error) == (1, 1, False, "it crashed")
        assert (report.stats.generation_tokens, report.stats.running) == (5, 0), "counters stay, gauges do not"
        assert EngineRows.open(scene.supervisor.rows_path).promise(0) is None, "promises of a dead engine are deleted"
        second.held.set()
        await scene.ready(2)
        second.beat(generation_tokens=4, running=1)
        report = scene.supervisor.reports()[0]
        assert (report.stats.generation_tokens, report.stats.running) == (9, 1)
        assert report.health.alive and report.health.error is None
        assert heard == [(0, record)]
        assert scene.now(1) is other and not scene.supervisor.failure.done()

    play(act, engines=2)


def test_the_state_changes_before_the_end_of_a_process_is_awaited() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        ending = scene.now().slowly()
        scene.now().die()
        await scene.until(lambda: scene.status() == EngineStatus(EngineState.DEAD, 1))
        assert len(scene.made) == 1, "the old one has not ended yet"
        ending.set()
        await scene.ready(2)

    play(act)


def test_an_engine_that_reports_a_failure_is_restarted() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now().say(Failed("CUDA error"))
        await scene.ready(2)
        assert scene.made[0].closed and scene.supervisor.reports()[0].deaths == 1

    play(act)


def test_after_five_deaths_in_a_minute_an_engine_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        for number in range(1, 6):
            (await scene.ready(number)).die(f"crash {number}")
        await scene.until(lambda: scene.status().final)
        assert scene.status() == EngineStatus(EngineState.DEAD, 5, True)
        said = [record.getMessage() for record in caplog.records]
        pauses = ("0", "0.001", "0.002", "0.002")
        assert said == [f"engine 0: crash {n}. Restarting it in {s} s" for n, s in enumerate(pauses, 1)] + [
            "engine 0: crash 5. Giving it up: 5 deaths in 60 s"
        ]
        assert scene.states == [EngineState.DEAD, EngineState.READY], "the other keeps serving"
        assert not scene.supervisor.failure.done() and len(scene.made) == 6
        for number in range(1, 6):
            (await scene.ready(number, engine=1)).die()
        with pytest.raises(EngineDeadError, match=r"^all engines have died too often; last error: it crashed$"):
            async with asyncio.timeout(30):
                await scene.supervisor.failure

    caplog.set_level(logging.ERROR, logger="roseinfer.cluster.supervisor")
    play(act, engines=2)


def test_a_restart_that_fails_is_a_death() -> None:
    def fails(process: FakeProcess) -> None:
        if process.number == 2:
            process.fails = ConfigError("no memory is left")

    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now().die()
        await scene.ready(3)
        assert scene.supervisor.reports()[0].deaths == 2

    play(act, script=fails)


def test_launches_are_tried_for_as_long_as_the_system_lacks_resources(caplog: pytest.LogCaptureFixture) -> None:
    def fails(process: FakeProcess) -> None:
        if 2 <= process.number < 12:
            process.spawn_fails = OSError(errno.EMFILE, "pipe")

    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now().die()
        await scene.ready(12)
        assert scene.supervisor.reports()[0].deaths == 1 and not scene.supervisor.failure.done()
        assert caplog.text.count("cannot start an engine process: Too many open files. Restarting it in") == 10

    play(act, script=fails)


def test_a_restart_with_other_files_of_the_model_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def changes(process: FakeProcess) -> None:
        process.info = changed(INFO, files="old" if process.number < 3 else "new")

    async def act(scene: Scene) -> None:
        await scene.start()
        for number in (2, 3, 4):
            scene.now().die()
            await scene.ready(number)
            reports = caplog.text.count("engine 0: the model's files have changed since it last started")
            assert reports == (number >= 3)

    play(act, script=changes)


def test_when_the_only_engine_cannot_come_back_its_last_error_is_raised() -> None:
    def fails(process: FakeProcess) -> None:
        if process.number > 1:
            process.fails = ConfigError("no memory is left")

    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now().die()
        with pytest.raises(EngineDeadError, match=r"^the engine has died too often; last error: no memory is left$"):
            async with asyncio.timeout(30):
                await scene.supervisor.failure

    play(act, script=fails)


def test_closing_ends_the_pause_before_a_restart() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now().die()
        await scene.until(lambda: scene.states == [EngineState.DEAD])
        async with asyncio.timeout(30):
            await scene.supervisor.close()

    play(act, times=replace(TIMES, restarts=RestartLimits(delays_s=(3600.0,))))


def test_closing_waits_for_a_process_that_is_ending() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        ending = scene.now().slowly()
        scene.now().die()
        await scene.until(lambda: scene.states == [EngineState.DEAD])
        closings = []
        for _ in range(2):
            closings.append(asyncio.create_task(scene.supervisor.close()))
            await asyncio.sleep(0.01)
        assert not any(closing.done() for closing in closings)
        ending.set()
        await asyncio.gather(*closings)
        assert len(scene.made) == 1

    play(act)


@pytest.mark.parametrize("seed", range(10))
def test_an_engine_has_one_process_at_a_time_and_recovers_from_any_failure(seed: int) -> None:
    rng = random.Random(seed)

    def moody(process: FakeProcess) -> None:
        assert all(other.closed for other in scenes[0].made if other.settings.index == process.settings.index)
        if process.number > 1 and scenes[0].up:
            mood = rng.randrange(6)
            process.fails = ConfigError("no memory is left") if mood == 0 else None
            process.spawn_fails = OSError(errno.EAGAIN, "fork") if mood == 1 else None
            if mood == 2:
                process.held.clear()

    async def act(scene: Scene) -> None:
        scenes.append(scene)
        await scene.start()
        rolls = []
        for _ in range(40):
            process = scene.now(rng.randrange(3))
            match rng.randrange(7):
                case 0 | 1:
                    process.die()
                case 2:
                    process.held.set()
                case 3:
                    rolls.append(asyncio.create_task(scene.supervisor.rolling_restart()))
                case 4 if process.held.is_set() and not process.closed and hasattr(process, "rows"):
                    process.step(draining=True, steps=rng.randrange(2 * SETTLED_STEPS))
                case 5:
                    scene.supervisor.check()
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.001, 0.005]))

        def healed() -> bool:
            for engine in range(3):
                scene.now(engine).held.set()
            return scene.states == [EngineState.READY] * 3 and all(roll.done() for roll in rolls)

        await scene.until(healed)
        assert all(process.closed for process in scene.made if process is not scene.now(process.settings.index))

    scenes: list[Scene] = []
    times = replace(TIMES, restarts=replace(LIMITS, max_deaths=10**6))
    play(act, engines=3, script=lambda process: moody(process) if scenes else None, drain_s=0.005, times=times)


def test_a_watch_that_fails_ends_the_server() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now().stats_fail = True
        with pytest.raises(RuntimeError, match="a bug"):
            async with asyncio.timeout(30):
                await scene.supervisor.failure
        scene.now().stats_fail = False

    play(act, times=CHECKING)


# --- hanging ------------------------------------------------------------------------------------------------------
def test_an_engine_without_heartbeat_is_late_then_killed_and_restarted() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        await scene.until(lambda: scene.states == [EngineState.QUIET])
        assert scene.status() == EngineStatus(EngineState.QUIET, 1)
        scene.now().beat()
        await scene.until(lambda: scene.states == [EngineState.READY])
        scene.now().step(step_s=0.0)
        await scene.ready(2)
        assert scene.made[0].killed and scene.supervisor.reports()[0].deaths == 1

    play(act, times=CHECKING)


def test_the_stacks_of_a_hanging_engine_are_logged_once_unless_it_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """A stopped process would write its stacks only when it is continued."""

    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now().stuck = scene.now().stopped = True
        for _ in range(10):
            scene.supervisor.check()
        assert scene.now().asked == 0 and scene.states == [EngineState.QUIET]
        scene.now().stopped = False
        for _ in range(100):
            scene.supervisor.check()
        assert scene.now().asked == 1 and caplog.text.count("when it did not respond:\nin a lock") == 1

    play(act)


def test_an_engine_that_takes_long_to_end_is_killed_once(caplog: pytest.LogCaptureFixture) -> None:
    """A process of a hundred GB may take as long."""

    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now().stuck = True
        for _ in range(200):
            scene.supervisor.check()
        assert caplog.text.count("killing it") == 1
        scene.now().die()
        await scene.ready(2)

    play(act)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stopped_engine_is_killed_when_the_server_closes(stopped: bool) -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now().stopped = stopped
        await scene.supervisor.close()
        assert scene.now().killed is stopped

    play(act)


def test_an_unresponsive_engine_is_killed_when_the_server_closes() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        while scene.states == [EngineState.READY]:
            scene.supervisor.check()
        assert scene.states == [EngineState.QUIET] and not scene.now().killed
        await scene.supervisor.close()
        assert scene.now().killed

    play(act)


def test_a_start_may_take_its_time_unless_the_process_is_stopped() -> None:
    async def act(scene: Scene) -> None:
        scene.up = False
        await scene.supervisor.launch()
        scene.clock.advance(1e5)
        for _ in range(1000):
            scene.supervisor.check()
        assert not scene.now().killed, "the duration of the first start is unknown"
        scene.now().held.set()
        await scene.supervisor.connect()
        scene.now().die()
        await scene.until(lambda: len(scene.made) == 2)
        scene.now().stopped = True
        for _ in range(100):
            assert not scene.now().closed
            scene.supervisor.check()
        await scene.until(lambda: len(scene.made) == 3)
        assert scene.made[1].killed
        scene.clock.advance(11 * 1e5)
        scene.supervisor.check()
        await scene.until(lambda: len(scene.made) == 4)
        assert scene.made[2].killed, "ten times as long as the first one took"

    play(act)


# --- rolling restart ----------------------------------------------------------------------------------------------
def test_a_rolling_restart_replaces_engines_in_turn_when_their_requests_have_ended() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now(0).step(running=2)
        rolling = asyncio.create_task(scene.supervisor.rolling_restart())
        joined = asyncio.create_task(scene.supervisor.rolling_restart())
        await scene.until(lambda: scene.now(0).sent == [DrainEngine()])
        assert scene.states == [EngineState.DRAINING, EngineState.READY]
        assert scene.status() == EngineStatus(EngineState.DRAINING, 1)
        for running, waiting in ((2, 0), (0, 1)):
            scene.now(0).step(running=running, waiting=waiting, draining=True)
            await asyncio.sleep(0.01)
            assert len(scene.made) == 2
        scene.up = False
        scene.now(0).step(draining=True)
        await scene.until(lambda: len(scene.made) == 3)
        await asyncio.sleep(0.01)
        assert scene.now(1).sent == [] and scene.made[0].closed, "the first is not back yet"
        scene.up = True
        scene.now(0).held.set()
        await scene.ready(2)
        scene.now(0).step(steps=SETTLED_STEPS)
        await scene.until(lambda: scene.now(1).sent == [DrainEngine()])
        scene.now(1).step(draining=True)
        async with asyncio.timeout(30):
            await rolling
            await joined
        assert [process.settings.index for process in scene.made] == [0, 1, 0, 1]
        reports = scene.supervisor.reports()
        assert [(report.restarts, report.deaths) for report in reports] == [(1, 0)] * 2

    play(act, engines=2, drain_s=5.0)


def test_running_requests_are_not_cut_until_another_engine_could_take_them_over() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        scene.now(0).step(running=2)
        rolling = asyncio.create_task(scene.supervisor.rolling_restart())
        await scene.until(lambda: scene.now(0).sent == [DrainEngine()])
        scene.up = False
        scene.now(1).die()
        scene.now(0).step(running=2, draining=True)
        await scene.until(lambda: scene.now(1).number == 2)
        await asyncio.sleep(0.2)
        assert not scene.made[0].closed, "its drain time is over, but the other engine is not back"
        scene.up = True
        scene.now(1).held.set()
        await scene.ready(2, engine=1)
        await scene.ready(2)
        scene.now(0).step(steps=SETTLED_STEPS)
        await scene.until(lambda: scene.now(1).sent == [DrainEngine()])
        scene.up = False
        scene.now(0).die()
        scene.now(1).step(draining=True)
        await scene.until(lambda: scene.now(1).number == 3)
        assert scene.status(0).state is EngineState.STARTING, "an engine without requests waits for no other"
        scene.now(0).held.set()
        scene.now(1).held.set()
        async with asyncio.timeout(30):
            await rolling

    play(act, engines=2, drain_s=0.05)


def test_the_next_waits_for_fifty_steps_of_the_restarted_engine() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        rolling = asyncio.create_task(scene.supervisor.rolling_restart())
        process = await scene.ready(2)
        process.step(steps=SETTLED_STEPS - 1)
        await asyncio.sleep(0.02)
        assert scene.now(1).number == 1
        process.step(steps=SETTLED_STEPS)
        (await scene.ready(2, engine=1)).step(steps=SETTLED_STEPS)
        await rolling

    play(act, engines=2, drain_s=0.0, times=replace(TIMES, settle_s=3600.0))


def test_the_next_waits_a_while_for_an_engine_without_work() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        for _ in range(2):
            await scene.supervisor.rolling_restart()
        assert [process.number for process in scene.made[-2:]] == [3, 3]

    play(act, engines=2, drain_s=0.0)


def test_deaths_while_draining_or_after_the_restart_do_not_end_a_rolling_restart() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        rolling = asyncio.create_task(scene.supervisor.rolling_restart())
        await scene.until(lambda: scene.now(0).sent == [DrainEngine()])
        scene.now(0).die()
        (await scene.ready(2)).die()
        await scene.until(lambda: scene.now(1).sent == [DrainEngine()])
        scene.now(1).step(draining=True)
        async with asyncio.timeout(30):
            await rolling
        assert scene.states == [EngineState.READY] * 2
        assert [report.deaths for report in scene.supervisor.reports()] == [2, 0]

    play(act, engines=2, drain_s=5.0)


def test_a_rolling_restart_stops_at_an_engine_that_does_not_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(process: FakeProcess) -> None:
        if process.number > 1:
            process.fails = ConfigError("the new model is broken")

    async def act(scene: Scene) -> None:
        await scene.start()
        async with asyncio.timeout(30):
            await scene.supervisor.rolling_restart()
        assert scene.states == [EngineState.DEAD, EngineState.READY] and scene.now(1).number == 1
        assert "engine 0 does not come back: the rolling restart stops here" in caplog.text

    play(act, engines=2, script=fails, drain_s=0.0)


def test_a_rolling_restart_revives_an_engine_that_was_given_up() -> None:
    async def act(scene: Scene) -> None:
        await scene.start()
        for number in range(1, 6):
            (await scene.ready(number)).die()
        await scene.until(lambda: scene.status().final)
        async with asyncio.timeout(30):
            await scene.supervisor.rolling_restart()
        assert scene.states == [EngineState.READY] * 2 and scene.now(1).number == 2

    play(act, engines=2, drain_s=0.0)


def test_no_rolling_restart_before_all_engines_are_up_nor_after_closing() -> None:
    async def act(scene: Scene) -> None:
        scene.up = False
        await scene.supervisor.launch()
        await scene.supervisor.rolling_restart()
        assert [process.sent for process in scene.made] == [[], []]
        for process in scene.made:
            process.held.set()
        await scene.supervisor.connect()
        rolling = asyncio.create_task(scene.supervisor.rolling_restart())
        await scene.until(lambda: scene.now(0).sent == [DrainEngine()])
        async with asyncio.timeout(30):
            await scene.supervisor.close()
            await rolling

    play(act, engines=2)


# --- step costs ---------------------------------------------------------------------------------------------------
def test_a_new_process_begins_with_the_step_costs_of_its_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("H200", "A2", "H200")
    specs = [EngineSpec(EngineConfig(), {"CUDA_VISIBLE_DEVICES": str(i)}, kind) for i, kind in enumerate(kinds)]
    monkeypatch.setattr(module, "engine_specs", lambda config, replicas: specs)

    async def reborn(scene: Scene, engine: int, number: int) -> EngineLaunch:
        scene.now(engine).die()
        return (await scene.ready(number, engine)).settings

    async def act(scene: Scene) -> None:
        await scene.start()
        assert [process.settings.costs for process in scene.made] == [None] * 3
        assert [process.settings.environment for process in scene.made] == [spec.environment for spec in specs]
        scene.now(2).step(steps=SETTLED_STEPS - 1, cost=StepCost(9.0))
        scene.supervisor.check()
        assert (await reborn(scene, 0, 2)).costs is None, "too few steps"
        scene.now(2).step(steps=SETTLED_STEPS, cost=COST)
        scene.supervisor.check()
        assert (await reborn(scene, 0, 3)).costs == COST, "a sibling's"
        assert (await reborn(scene, 1, 2)).costs is None, "of another kind of device"
        assert (await reborn(scene, 2, 2)).costs == COST, "its own"

    play(act, engines=3)


# --- real processes -----------------------------------------------------------------------------------------------
OWNER = """
import asyncio, sys
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.cluster.supervisor import EngineSupervisor
from roseinfer.engine.options import make_engine_config

async def main():
    config = make_engine_config(device="priced", cost=sys.argv[1], num_kv_blocks=64, max_num_seqs=4)
    supervisor = EngineSupervisor(config, ReplicasConfig(replicas=2), stall_s=60)
    await supervisor.launch()
    await supervisor.connect()
    print(supervisor.folder, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_engines_of_a_killed_server_end_and_leave_nothing(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(cost_as_json(CostParams())))
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(cost)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert sorted(path.name for path in folder.iterdir()) == [
        "engine0",
        "engine1",
        "locked",
        "rows",
        "stacks0",
        "stacks1",
    ]
    engines = children(owner.pid)
    assert len(engines) == 2
    for pid in engines:
        assert b"roseinfer.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert os.getpgid(pid) == os.getpgid(owner.pid)
    os.kill(engines[0], signal.SIGSTOP)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline_s = time.monotonic() + 30
    os.kill(engines[0], signal.SIGCONT)
    while folder.exists() or any(Path(f"/proc/{pid}").exists() and not zombie(pid) for pid in engines):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def zombie(pid: int) -> bool:
    try:
        return b") Z " in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
