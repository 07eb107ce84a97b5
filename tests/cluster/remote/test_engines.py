"""Clients of engines on other hosts, whose servers respond, hang, disconnect and return by script."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from roseinfer.cluster.remote import subscription, transport
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.remote.handshake import HandshakeError, Purpose, VerifiedPeer, accept
from roseinfer.cluster.remote.listener import Listener
from roseinfer.cluster.remote.messages import StatusUpdate
from roseinfer.cluster.remote.tls import MAX_FRAME_BYTES
from roseinfer.cluster.remote.transport import MAX_ROUND_TRIP_S, TlsTransport
from roseinfer.cluster.status import EngineStatus
from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import EngineDeadError
from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.promise import Promise
from roseinfer.core.request import Prompt
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState, StepRecord
from roseinfer.engine.messages import Add, EngineMessage, Heartbeat, PromiseUpdate, Ready
from tests.helpers.model_engine import INFO
from tests.helpers.remote import LOOPBACK, foreign_tls, own_tls

TIMEOUT_S = 30.0
QUIET_S, LOST_S = 2.0, 6.0  # in checks of .25 s, which are made by hand or sooner here
READY = EngineStatus(EngineState.READY, 1)
HEALTHY = EngineReport(0, EngineState.READY, EngineHealth(True, 0.1), SchedulerStats(), info=INFO)


class ServerConnection:
    """Connection as the engine or its server sees it."""

    def __init__(self, connection: socket.socket, peer: VerifiedPeer) -> None:
        self.purpose = peer.purpose
        self._socket = connection
        self._frames = peer.frames

    def send(self, message: object) -> None:
        self._socket.sendall(self._frames.wrap(msgspec.msgpack.encode(message)))

    def close(self) -> None:
        self._socket.close()


class ScriptedServer:
    """Server of an engine, and the engine, that send messages on request."""

    def __init__(self) -> None:
        self.number = 1
        self.connections: list[ServerConnection] = []
        self.listener = Listener(own_tls(), lambda: self.number, pass_on=self._pass_on, admit=self._admit)
        self.address = self.listener.open(LOOPBACK)
        self.listener.accept()
        self._tasks: set[asyncio.Task[None]] = set()

    def _admit(self, connection: socket.socket, peer: VerifiedPeer) -> bool:
        self.connections.append(ServerConnection(connection, peer))
        return True

    def _pass_on(self, connection: socket.socket) -> bool:
        """Do what the engine's process does."""

        async def greet() -> None:
            try:
                peer = await accept(connection, own_tls().contexts(), Purpose.ENGINE, self.number)
            except (HandshakeError, OSError):
                connection.close()
            else:
                self._admit(connection, peer)

        task = asyncio.create_task(greet())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def connection(self, purpose: Purpose) -> ServerConnection:
        """Wait for a connection of this purpose that no test has taken, and take it."""
        while not any(each.purpose is purpose for each in self.connections):
            await asyncio.sleep(0.002)
        found = next(each for each in self.connections if each.purpose is purpose)
        self.connections.remove(found)
        return found

    async def close(self) -> None:
        await self.listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self.connections:
            each.close()


class Scene:
    def __init__(self, server: ScriptedServer, check_interval_s: float) -> None:
        self.clock = ManualClock()
        self.server = server
        self.engines = RemoteEngines(
            own_tls(), quiet_s=QUIET_S, lost_s=LOST_S, clock=self.clock, check_interval_s=check_interval_s
        )
        self.engines.add(4, server.address)
        self.said: list[EngineMessage] = []
        self.deaths: list[str] = []
        self.transports: list[TlsTransport] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.002)

    async def state(self, state: EngineState) -> None:
        await self.until(lambda: self.engines.status(4).state is state)

    async def connected(self) -> tuple[TlsTransport, ServerConnection]:
        """Return a transport to the engine, and the engine's end."""
        transport = self.engines.transport(4)
        self.transports.append(transport)
        starting = asyncio.create_task(transport.start(self.said.append, self.deaths.append))
        connection = await self.server.connection(Purpose.ENGINE)
        connection.send(Ready(INFO))
        assert await starting == INFO
        return transport, connection


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "FIRST_RETRY_S", 0.002)
    monkeypatch.setattr(subscription, "MAX_RETRY_S", 0.01)


def play(act: Callable[[Scene], Coroutine[Any, Any, None]], check_interval_s: float = 3600.0) -> None:
    @contextlib.asynccontextmanager
    async def scene() -> AsyncIterator[Scene]:
        server = ScriptedServer()
        made = Scene(server, check_interval_s)
        try:
            yield made
        finally:
            for transport in made.transports:
                await transport.close()
            made.engines.close()
            await server.close()

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S), scene() as made:
            await act(made)
        await asyncio.sleep(0.01)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, "nothing follows engines that were forgotten"

    asyncio.run(main())


def test_the_status_is_known_as_the_server_sends_it() -> None:
    async def act(scene: Scene) -> None:
        engines, steps = scene.engines, []
        engines.on_step(lambda number, step: steps.append((number, step)))
        assert engines.status(4) == EngineStatus() and engines.report(4) is None
        status = await scene.server.connection(Purpose.STATUS)
        scene.clock.advance(40.0)
        step = StepRecord(3, 0.1, ended_s=3599.5)
        status.send(StatusUpdate(READY, HEALTHY, [step], 3600.0))
        await scene.state(EngineState.READY)
        assert engines.status(4) == READY and engines.report(4) == HEALTHY
        assert steps == [(4, step._replace(ended_s=scene.clock.now() - 0.5))], "on our clock"
        status.send(StatusUpdate(EngineStatus(EngineState.DRAINING, 2), HEALTHY))
        await scene.state(EngineState.DRAINING)
        status.send(StatusUpdate(EngineStatus(EngineState.DEAD, 5, True), HEALTHY))
        await scene.state(EngineState.DEAD)
        assert engines.status(4) == EngineStatus(EngineState.DEAD, 5, True)

    play(act)


def test_an_engine_is_dead_while_its_server_is_lost() -> None:
    async def act(scene: Scene) -> None:
        status = await scene.server.connection(Purpose.STATUS)
        status.send(StatusUpdate(READY, HEALTHY))
        await scene.state(EngineState.READY)
        status.close()
        await scene.state(EngineState.DEAD)
        status = await scene.server.connection(Purpose.STATUS)
        status.send(StatusUpdate(EngineStatus(EngineState.READY, 2), HEALTHY))
        await scene.state(EngineState.READY)
        assert scene.engines.status(4).number == 2

    play(act)


def test_an_engine_without_heartbeat_is_quiet_and_then_disconnected() -> None:
    """The network is cut: nothing comes, and no connection ends."""

    async def act(scene: Scene) -> None:
        status = await scene.server.connection(Purpose.STATUS)
        status.send(StatusUpdate(READY, HEALTHY))
        await scene.state(EngineState.READY)
        _, connection = await scene.connected()
        for _ in range(7):
            scene.engines.check_silence()
        assert scene.engines.status(4).state is EngineState.READY
        scene.engines.check_silence()
        assert scene.engines.status(4) == EngineStatus(EngineState.QUIET, 1, host_lost=True)
        connection.send(PromiseUpdate(Promise(0.0, running=1), 0.0))
        await scene.state(EngineState.READY)  # a message of the engine, not of its server
        for _ in range(24):
            scene.engines.check_silence()
        assert scene.deaths == [f"no heartbeat from the engine at {scene.server.address} for 6 s"]
        assert (await scene.server.connection(Purpose.STATUS)).purpose is Purpose.STATUS, "and a new connection is made"

    play(act)


def test_heartbeats_are_checked_periodically() -> None:
    async def act(scene: Scene) -> None:
        status = await scene.server.connection(Purpose.STATUS)
        status.send(StatusUpdate(READY, HEALTHY))
        await scene.state(EngineState.READY)
        await scene.state(EngineState.QUIET)

    play(act, check_interval_s=0.01)


def test_promises_are_converted_to_our_clock() -> None:
    async def act(scene: Scene) -> None:
        scene.clock.advance(5000.0)
        _, connection = await scene.connected()
        written = scene.engines.write_count(4)
        connection.send(PromiseUpdate(Promise(3600.0 + 17.0, step_s=0.5, steps=7), 0.25))
        await scene.until(lambda: scene.engines.write_count(4) > written)
        promise = scene.engines.promise(4)
        assert promise is not None
        assert promise == Promise(promise.at_s, step_s=0.5, steps=7)
        assert 4999.75 - MAX_ROUND_TRIP_S <= promise.at_s < 4999.75, "older by the round trip"
        assert not scene.said, "they are not answers of the engine"
        connection.send(beat := Heartbeat(SchedulerStats(), 99.0))
        await scene.until(lambda: scene.said == [beat])

    play(act)


def test_promises_of_the_previous_process_are_void() -> None:
    async def act(scene: Scene) -> None:
        _, connection = await scene.connected()
        connection.send(PromiseUpdate(Promise(0.0, steps=7), 0.0))
        await scene.until(lambda: scene.engines.promise(4) is not None)
        connection.close()
        await scene.until(lambda: bool(scene.deaths))
        scene.server.number = 2
        written = scene.engines.write_count(4)
        await scene.connected()
        assert scene.engines.promise(4) is None and scene.engines.write_count(4) > written
        assert scene.engines.status(4).number == 2, "though its server has not said so yet"

    play(act)


def test_a_message_that_makes_no_sense_ends_the_connection() -> None:
    async def act(scene: Scene) -> None:
        _, connection = await scene.connected()
        connection.send(["nonsense"])
        await scene.until(lambda: bool(scene.deaths))
        assert "the engine sent an invalid message" in scene.deaths[0]

    play(act)


def test_an_engine_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_UNSENT_BYTES", 2**16)

    async def act(scene: Scene) -> None:
        connected, _ = await scene.connected()
        large = Add("r", Prompt(list(range(200_000)), None))  # type: ignore[arg-type]
        for _ in range(30):
            connected.send(large)
        assert not scene.deaths, "never in the middle of a call of the sender"
        await scene.until(lambda: bool(scene.deaths))

    play(act)


def test_a_message_over_the_limit_of_engines_is_not_sent() -> None:
    async def act(scene: Scene) -> None:
        connected, _ = await scene.connected()
        with pytest.raises(OverflowError):
            connected.send(Add("x" * MAX_FRAME_BYTES, Prompt([], None)))  # type: ignore[arg-type]
        assert not scene.deaths

    play(act)


def test_a_failed_handshake_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        foreign = RemoteEngines(foreign_tls(), quiet_s=QUIET_S, lost_s=LOST_S)
        foreign.add(5, scene.server.address)
        await scene.until(lambda: scene.server.listener.refused >= 5)
        assert "not signed by our CA" in str(foreign.refusal(5)) and scene.engines.refusal(4) is None
        with pytest.raises(EngineDeadError, match="not signed by our CA"):
            await foreign.transport(5).start(scene.said.append, scene.deaths.append)
        foreign.close()

    play(act)
    logged = [message for message in caplog.messages if "cannot reach" in message]
    assert len(logged) == 1 and "not signed by our CA" in logged[0]


def test_an_engine_of_another_name_at_the_address_is_rejected() -> None:
    """A directory tells the name of each engine, so that the next one at an address is not taken for it."""

    async def act(scene: Scene) -> None:
        scene.engines.add(5, scene.server.address, "engine-of-another-name")
        await scene.until(lambda: scene.engines.refusal(5) is not None)
        assert "engine-of-another-name" in str(scene.engines.refusal(5))

    play(act)


def test_an_engine_that_is_not_there_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        await scene.server.connection(Purpose.STATUS)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = scene.server.address._replace(port=closed.getsockname()[1])
        scene.engines.add(5, address)
        await scene.until(lambda: f"cannot reach the engine at {address}: Connection refused" in caplog.messages)
        with pytest.raises(EngineDeadError, match="cannot reach the engine"):
            await scene.engines.transport(5).start(scene.said.append, scene.deaths.append)

    play(act)
    assert len([message for message in caplog.messages if "refused" in message]) == 1


def test_an_engine_that_was_forgotten_is_dead() -> None:
    async def act(scene: Scene) -> None:
        status = await scene.server.connection(Purpose.STATUS)
        status.send(StatusUpdate(READY, HEALTHY))
        await scene.state(EngineState.READY)
        scene.engines.forget(4)
        assert scene.engines.status(4) == EngineStatus(EngineState.DEAD)
        assert scene.engines.promise(4) is None and scene.engines.write_count(4) == 0
        scene.engines.forget(4)

    play(act)
