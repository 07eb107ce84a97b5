"""What a process knows of engines on other hosts, whose keepers say, fall silent, go and come back by script."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from roseinfer.cluster.remote import engines as module
from roseinfer.cluster.remote import subscription as follow
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.remote.messages import StatusUpdate
from roseinfer.cluster.status import EngineStatus
from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import EngineDeadError
from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.promise import Promise
from roseinfer.core.request import Prompt
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState, StepRecord
from roseinfer.engine.messages import Add, EngineMessage, Heartbeat, PromiseUpdate, Ready
from roseinfer.engine.remote.gate import Gate
from roseinfer.engine.remote.handshake import Greeted, Purpose
from roseinfer.engine.remote.sealed import Keys, SealedFrames
from roseinfer.engine.remote.secret import Secret
from roseinfer.engine.remote.transport import MAX_ROUND_TRIP_S, TcpTransport
from tests.helpers.model_engine import INFO
from tests.helpers.remote import LOOPBACK, SECRET

PATIENCE_S = 30.0
QUIET_S, LOST_S = 2.0, 6.0  # in looks of .25 s, which come quicker here
READY = EngineStatus(EngineState.READY, 1)
HEALTHY = EngineReport(0, EngineState.READY, EngineHealth(True, 0.1), SchedulerStats(), info=INFO)


class Line:
    """A connection as the engine, or its keeper, has it."""

    def __init__(self, connection: socket.socket, greeted: Greeted) -> None:
        self.purpose = greeted.purpose
        self._socket = connection
        self._frames = SealedFrames(greeted.keys)

    def say(self, message: object) -> None:
        self._socket.sendall(self._frames.wrap(msgspec.msgpack.encode(message)))

    def close(self) -> None:
        self._socket.close()


class Keeper:
    """One on this host that says what a test has it say."""

    def __init__(self) -> None:
        self.number = 1
        self.lines: list[Line] = []
        self.gate = Gate(SECRET, lambda: self.number, self._admit)
        self.address = self.gate.open(LOOPBACK)
        self.gate.accept()

    def _admit(self, connection: socket.socket, greeted: Greeted) -> bool:
        self.lines.append(Line(connection, greeted))
        return True

    async def line(self, purpose: Purpose) -> Line:
        """The newest of these that has not been taken."""
        while not any(line.purpose is purpose for line in self.lines):
            await asyncio.sleep(0.002)
        found = next(line for line in self.lines if line.purpose is purpose)
        self.lines.remove(found)
        return found

    async def close(self) -> None:
        await self.gate.close()
        for line in self.lines:
            line.close()


class Scene:
    def __init__(self, keeper: Keeper) -> None:
        self.clock = ManualClock()
        self.keeper = keeper
        self.engines = RemoteEngines(SECRET, quiet_s=QUIET_S, lost_s=LOST_S, clock=self.clock)
        self.engines.add(4, keeper.address)
        self.said: list[EngineMessage] = []
        self.deaths: list[str] = []
        self.ways: list[TcpTransport] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.002)

    async def state(self, state: EngineState) -> None:
        await self.until(lambda: self.engines.status(4).state is state)

    async def connected(self) -> tuple[TcpTransport, Line]:
        """A way to the engine, and its end there."""
        transport = self.engines.transport(4)
        self.ways.append(transport)
        starting = asyncio.create_task(transport.start(self.said.append, self.deaths.append))
        line = await self.keeper.line(Purpose.ENGINE)
        line.say(Ready(INFO))
        assert await starting == INFO
        return transport, line


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "FIRST_WAIT_S", 0.002)
    monkeypatch.setattr(follow, "LONGEST_WAIT_S", 0.01)


def play(act: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    @contextlib.asynccontextmanager
    async def scene() -> AsyncIterator[Scene]:
        keeper = Keeper()
        made = Scene(keeper)
        try:
            yield made
        finally:
            for way in made.ways:
                await way.close()
            made.engines.close()
            await keeper.close()

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), scene() as made:
            await act(made)
        await asyncio.sleep(0.01)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, "nobody looks after engines that were forgotten"

    asyncio.run(main())


def test_what_the_keeper_says_is_what_is_known() -> None:
    async def act(scene: Scene) -> None:
        engines, steps = scene.engines, []
        engines.on_step(lambda number, step: steps.append((number, step)))
        assert engines.status(4) == EngineStatus() and engines.report(4) is None
        keeper = await scene.keeper.line(Purpose.FOLLOW)
        scene.clock.advance(40.0)
        step = StepRecord(3, 0.1, ended_s=3599.5)
        keeper.say(StatusUpdate(READY, HEALTHY, [step], 3600.0))
        await scene.state(EngineState.READY)
        assert engines.status(4) == READY and engines.report(4) == HEALTHY
        assert steps == [(4, step._replace(ended_s=scene.clock.now() - 0.5))], "on our clock"
        keeper.say(StatusUpdate(EngineStatus(EngineState.DRAINING, 2), HEALTHY))
        await scene.state(EngineState.DRAINING)
        keeper.say(StatusUpdate(EngineStatus(EngineState.DEAD, 5, True), HEALTHY))
        await scene.state(EngineState.DEAD)
        assert engines.status(4) == EngineStatus(EngineState.DEAD, 5, True)

    play(act)


def test_a_keeper_that_is_lost_is_dead_until_it_is_back() -> None:
    async def act(scene: Scene) -> None:
        keeper = await scene.keeper.line(Purpose.FOLLOW)
        keeper.say(StatusUpdate(READY, HEALTHY))
        await scene.state(EngineState.READY)
        keeper.close()
        await scene.state(EngineState.DEAD)
        keeper = await scene.keeper.line(Purpose.FOLLOW)
        keeper.say(StatusUpdate(EngineStatus(EngineState.READY, 2), HEALTHY))
        await scene.state(EngineState.READY)
        assert scene.engines.status(4).number == 2

    play(act)


def test_silence_is_quiet_and_then_the_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut network: nothing comes, and no connection ends."""
    looks = []

    async def act(scene: Scene) -> None:
        keeper = await scene.keeper.line(Purpose.FOLLOW)
        keeper.say(StatusUpdate(READY, HEALTHY))
        await scene.state(EngineState.READY)
        _, line = await scene.connected()
        remote = scene.engines._engines[4]
        for _ in range(7):
            looks.append(remote.look(24))
        assert scene.engines.status(4).state is EngineState.READY
        remote.look(24)
        assert scene.engines.status(4) == EngineStatus(EngineState.QUIET, 1, host_lost=True)
        line.say(PromiseUpdate(Promise(0.0, running=1), 0.0))
        await scene.state(EngineState.READY)  # heard again, though not by its keeper
        for _ in range(24):
            remote.look(24)
        assert scene.deaths == [f"nothing was heard of the engine at {scene.keeper.address} for 6 s"]
        assert (await scene.keeper.line(Purpose.FOLLOW)).purpose is Purpose.FOLLOW, "and its keeper is called anew"

    monkeypatch.setattr(module.RemoteEngines, "_look_on", lambda self: asyncio.sleep(3600))
    play(act)


def test_engines_are_looked_at_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Scene) -> None:
        keeper = await scene.keeper.line(Purpose.FOLLOW)
        keeper.say(StatusUpdate(READY, HEALTHY))
        await scene.state(EngineState.READY)
        scene.engines._quiet_looks = 3
        await scene.state(EngineState.QUIET)

    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.01)
    play(act)


def test_promises_are_on_our_clock_whatever_that_of_the_engine_says() -> None:
    async def act(scene: Scene) -> None:
        scene.clock.advance(5000.0)
        _, line = await scene.connected()
        written = scene.engines.write_count(4)
        line.say(PromiseUpdate(Promise(3600.0 + 17.0, step_s=0.5, steps=7), 0.25))
        await scene.until(lambda: scene.engines.write_count(4) > written)
        promise = scene.engines.promise(4)
        assert promise is not None
        assert promise == Promise(promise.at_s, step_s=0.5, steps=7)
        assert 4999.75 - MAX_ROUND_TRIP_S <= promise.at_s < 4999.75, "older by the way there and back"
        assert not scene.said, "they are none of the engine's answers"
        line.say(beat := Heartbeat(SchedulerStats(), 99.0))
        await scene.until(lambda: scene.said == [beat])

    play(act)


def test_what_the_process_before_has_promised_is_void() -> None:
    async def act(scene: Scene) -> None:
        _, line = await scene.connected()
        line.say(PromiseUpdate(Promise(0.0, steps=7), 0.0))
        await scene.until(lambda: scene.engines.promise(4) is not None)
        line.close()
        await scene.until(lambda: bool(scene.deaths))
        scene.keeper.number = 2
        written = scene.engines.write_count(4)
        await scene.connected()
        assert scene.engines.promise(4) is None and scene.engines.write_count(4) > written
        assert scene.engines.status(4).number == 2, "though its keeper has not said so yet"

    play(act)


def test_a_message_that_makes_no_sense_ends_the_connection() -> None:
    async def act(scene: Scene) -> None:
        _, line = await scene.connected()
        line.say(["nonsense"])
        await scene.until(lambda: bool(scene.deaths))
        assert "nobody understands" in scene.deaths[0]

    play(act)


def test_an_engine_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.engine.remote.transport.MAX_UNSENT_BYTES", 2**16)

    async def act(scene: Scene) -> None:
        transport, _ = await scene.connected()
        large = Add("r", Prompt(list(range(200_000)), None))  # type: ignore[arg-type]
        for _ in range(30):
            transport.send(large)
        assert not scene.deaths, "whoever sends is in the middle of something"
        await scene.until(lambda: bool(scene.deaths))

    play(act)


def test_a_message_that_no_engine_would_take_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Scene) -> None:
        transport, _ = await scene.connected()
        assert transport._link is not None
        transport._link._frames = SealedFrames(Keys(b"a" * 32, b"b" * 32), 1000)
        with pytest.raises(OverflowError):
            transport.send(Add("r", Prompt(list(range(2000)), None)))  # type: ignore[arg-type]
        assert not scene.deaths

    play(act)


def test_a_wrong_secret_is_told_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        scene.engines.add(5, scene.keeper.address, Secret(b"quite another secret"))
        await scene.until(lambda: scene.keeper.gate.refused >= 5)
        refusal = scene.engines.refusal(5)
        assert str(refusal) == "the engine has another secret" and scene.engines.refusal(4) is None
        with pytest.raises(EngineDeadError, match="another secret"):
            await scene.engines.transport(5).start(scene.said.append, scene.deaths.append)

    play(act)
    told = [message for message in caplog.messages if "cannot be reached" in message]
    assert len(told) == 1 and told[0].endswith(": the engine has another secret")


def test_an_engine_that_is_not_there_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        await scene.keeper.line(Purpose.FOLLOW)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = scene.keeper.address._replace(port=closed.getsockname()[1])
        scene.engines.add(5, address)
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDeadError, match="there is no engine"):
            await scene.engines.transport(5).start(scene.said.append, scene.deaths.append)
        assert f"the engine at {address} cannot be reached: Connection refused" in caplog.messages

    play(act)
    assert len([message for message in caplog.messages if "refused" in message]) == 1


def test_an_engine_that_was_forgotten_is_dead_and_nobody_is_followed() -> None:
    async def act(scene: Scene) -> None:
        keeper = await scene.keeper.line(Purpose.FOLLOW)
        keeper.say(StatusUpdate(READY, HEALTHY))
        await scene.state(EngineState.READY)
        scene.engines.forget(4)
        assert scene.engines.status(4) == EngineStatus(EngineState.DEAD)
        assert scene.engines.promise(4) is None and scene.engines.write_count(4) == 0
        scene.engines.forget(4)

    play(act)
