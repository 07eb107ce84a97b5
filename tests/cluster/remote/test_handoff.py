"""Connections from other hosts in the engine: accepted ones, messages sent, and disconnects."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from roseinfer.cluster.remote import handshake, schema
from roseinfer.cluster.remote.handoff import Handoff, PeerConnections
from roseinfer.cluster.remote.tls import MAX_FRAME_BYTES, TlsFrames, TlsSession
from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.promise import Promise
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.messages import (
    OWNER,
    Abort,
    Add,
    Disconnected,
    DrainEngine,
    EngineMessage,
    Heartbeat,
    Invalid,
    PromiseUpdate,
    Received,
    Shutdown,
)
from roseinfer.engine.sockets import ClientSockets
from roseinfer.processes.frames import Frames, frame
from tests.helpers.remote import own_tls

TIMEOUT_S = 10.0


class Peer:
    """Client on another host, as the engine sees it."""

    def __init__(self, peers: "Peers") -> None:
        self.socket, theirs = socket.socketpair()
        theirs.setblocking(False)
        client, server = TlsSession(own_tls().contexts(), "127.0.0.1"), TlsSession(own_tls().contexts())

        async def handshakes() -> None:
            self.socket.setblocking(False)
            await asyncio.gather(client.handshake(self.socket), server.handshake(theirs))
            self.socket.settimeout(TIMEOUT_S)

        asyncio.run(handshakes())
        self.session, self.frames = client, TlsFrames(client)
        peers.add(theirs, TlsFrames(server))
        self._read: list[bytes] = []

    def send(self, message: object) -> None:
        self.socket.sendall(self.frames.wrap(msgspec.msgpack.encode(message)))

    def read(self) -> EngineMessage:
        while not self._read:
            data = self.socket.recv(65536)
            assert data, "the engine has hung up"
            self._read += self.frames.feed(data)
        return msgspec.msgpack.decode(self._read.pop(0), type=EngineMessage)

    @property
    def cut(self) -> bool:
        try:
            return self.socket.recv(65536) == b""
        except ConnectionError:
            return True


class Peers:
    """`PeerSource` of connections whose handshake is complete."""

    def __init__(self) -> None:
        self._wake, self._woken = socket.socketpair()
        self._ready: list[tuple[socket.socket, Frames]] = []

    def add(self, connection: socket.socket, frames: Frames) -> None:
        self._ready.append((connection, frames))
        self._wake.send(b"x")

    def fileno(self) -> int:
        return self._woken.fileno()

    def take(self) -> list[tuple[socket.socket, Frames]]:
        if self._ready:
            self._woken.recv(4096)
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        self._wake.close()
        self._woken.close()


class Engine:
    """Sockets of an engine with an owner on this host, and peers."""

    def __init__(self, path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        self.peers = Peers()
        self.clients = ClientSockets(listener)
        self.clients.accept_peers(self.peers)
        self.owner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.owner.connect(str(path))

    def peer(self) -> Peer:
        peer = Peer(self.peers)
        self.clients.receive(0.0)
        return peer

    def receive(self, count: int) -> list[Received]:
        received: list[Received] = []
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(received) < count:
            received += self.clients.receive(0.05)
            assert time.monotonic() < deadline_s
        return received

    def close(self) -> None:
        self.clients.close(0.0)
        self.owner.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "engine")
    yield made
    made.close()


BEAT = Heartbeat(SchedulerStats(), 1.0)
ADD = Add("r", Prompt([1, 2], SequenceParams()), age_s=0.5, sent_s=123.0)


def test_peers_are_served_like_clients_of_this_host_but_never_own_the_engine(engine: Engine) -> None:
    peer = engine.peer()
    peer.send(ADD)
    peer.send(Shutdown())
    [(first, add), (second, shutdown)] = engine.receive(2)
    assert first == second != OWNER and isinstance(shutdown, Shutdown)
    assert isinstance(add, Add) and add.request_id == "r"
    assert add.sent_s is None and add.age_s == 0.5, "its clock is another one"
    engine.clients.send(first, BEAT)
    assert peer.read() == BEAT
    peer.socket.close()
    assert engine.receive(1) == [(first, Disconnected())]


def test_a_peer_before_the_owner_is_accepted_is_no_owner(engine: Engine) -> None:
    peer = Peer(engine.peers)  # and the engine has not read yet
    peer.send(Abort([]))
    assert engine.receive(1) == [(OWNER + 1, Abort([]))]


def test_a_peer_that_connects_while_the_engine_loads_is_greeted_afterwards(engine: Engine) -> None:
    peer = Peer(engine.peers)
    engine.clients.greet(BEAT)
    assert peer.read() == BEAT
    later = engine.peer()
    assert later.read() == BEAT


def test_peers_get_promises_with_their_age_and_not_too_often(engine: Engine) -> None:
    engine.owner.setblocking(False)
    peer = engine.peer()
    began_s = time.monotonic()
    engine.clients.publish(Promise(began_s - 2.0, step_s=0.5, running=3))
    promised = peer.read()
    assert isinstance(promised, PromiseUpdate) and promised.promise.running == 3
    assert 2.0 <= promised.age_s <= 2.0 + time.monotonic() - began_s
    for step in range(100):
        engine.clients.publish(Promise(time.monotonic(), step_s=1e-4, steps=step))
    engine.clients.publish(Promise(time.monotonic(), steps=100))  # idle: nothing follows soon
    told = [promised]
    while told[-1].promise.steps < 100:
        message = peer.read()
        assert isinstance(message, PromiseUpdate)
        told.append(message)
    assert len(told) < 60, "steps that are over in no time are not told one by one"
    with pytest.raises(BlockingIOError):
        engine.owner.recv(1)  # clients on this host read the shared memory instead


def test_a_late_peer_gets_the_newest_promise_at_once(engine: Engine) -> None:
    engine.clients.greet(BEAT)
    engine.clients.publish(Promise(time.monotonic() - 5.0, steps=7))
    peer = engine.peer()
    assert peer.read() == BEAT
    promised = peer.read()
    assert isinstance(promised, PromiseUpdate) and promised.promise.steps == 7 and promised.age_s >= 5.0


@pytest.mark.parametrize("seed", range(8))
def test_bytes_that_are_no_message_end_that_peer_alone(
    engine: Engine, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    good, bad = engine.peer(), engine.peer()
    bad.socket.sendall(rng.randbytes(4)[:3] + b"\x00" + rng.randbytes(rng.randint(100, 100_000)))
    bad.socket.shutdown(socket.SHUT_WR)
    good.send(Abort(["x"]))
    received = engine.receive(2)
    assert sorted(type(message).__name__ for _, message in received) == ["Abort", "Disconnected"]
    assert bad.cut
    assert len(caplog.messages) <= 1
    engine.clients.broadcast(BEAT)
    assert good.read() == BEAT


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\xc1", b"\x00", b"\x93\xa3add", b"\x91\xa7nothing", b"\x80"),
        msgspec.msgpack.encode(["add", 3, "x"]),
        b"\x91" * 100_000 + b"\xc0",
        b"\x93\xa3add\xa1r" + b"\x91" * 100_000 + b"\xc0",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_sealed_frame_that_is_no_message_ends_that_peer_alone(engine: Engine, body: bytes) -> None:
    good, bad = engine.peer(), engine.peer()
    bad.socket.sendall(bad.frames.wrap(body))
    assert [message for _, message in engine.receive(1)] == [Disconnected()]
    assert bad.cut
    good.send(DrainEngine())
    assert [message for _, message in engine.receive(1)] == [DrainEngine()]


def test_an_unreadable_request_is_rejected_and_the_peer_stays(engine: Engine) -> None:
    peer = engine.peer()
    peer.send(["add", "r", "no list", {}])
    [(number, rejected)] = engine.receive(1)
    assert isinstance(rejected, Invalid) and rejected.request_id == "r"
    engine.clients.send(number, rejected)
    assert peer.read() == rejected


def test_a_huge_frame_is_not_waited_for(engine: Engine) -> None:
    peer = engine.peer()
    peer.socket.sendall(peer.session.encrypt((2**32 - 1).to_bytes(4, "little")))
    assert [message for _, message in engine.receive(1)] == [Disconnected()]
    assert peer.cut


def test_a_message_that_is_too_long_for_a_peer_ends_that_peer_alone(engine: Engine) -> None:
    good, other = engine.peer(), engine.peer()
    good.send(DrainEngine())
    [(number, _)] = engine.receive(1)
    engine.clients.send(number + 1, Invalid("r", "x" * MAX_FRAME_BYTES, None, None))
    assert engine.receive(1) == [(number + 1, Disconnected())] and other.cut
    engine.clients.broadcast(BEAT)
    assert good.read() == BEAT


def test_plain_text_ends_that_peer_alone(engine: Engine) -> None:
    peer = engine.peer()
    peer.socket.sendall(frame(msgspec.msgpack.encode(Abort(["x"]))))
    assert [message for _, message in engine.receive(1)] == [Disconnected()]


# --- the handoff ----------------------------------------------------------------------------------------------------
def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextlib.asynccontextmanager
async def handoff() -> AsyncIterator[tuple[Handoff, PeerConnections, list[tuple[str, str]]]]:
    """Yield both ends, and the rejections that the server's end receives."""
    refused: list[tuple[str, str]] = []
    made = Handoff(lambda host, error: refused.append((host, str(error))))
    peers = PeerConnections(made.inside.dup(), own_tls(), 7)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield made, peers, refused
    finally:
        await asyncio.to_thread(peers.close)
        made.close()


def test_the_engine_gets_connections_when_their_handshake_is_complete() -> None:
    async def work() -> None:
        async with handoff() as (made, peers, refused):
            one, other = tcp_pair()
            one.setblocking(False)
            assert made.give(other) and other.fileno() == -1
            session = TlsSession(own_tls().contexts(), "127.0.0.1")
            await session.handshake(one)
            assert not peers.take(), "its version is not known yet"
            await session.write(one, hello())
            while not (taken := peers.take()):
                await asyncio.sleep(0.005)
            [(connection, frames)] = taken
            answer = await session.read_exactly(one, handshake.SERVER_HELLO.size)
            assert handshake.SERVER_HELLO.unpack(answer)[-1] == 7 and not refused
            one.setblocking(True)
            one.sendall(TlsFrames(session).wrap(b"a message"))
            connection.setblocking(True)
            assert frames.feed(connection.recv(4096)) == [b"a message"]
            connection.close()
            one.close()

    asyncio.run(work())


def hello() -> bytes:
    return handshake.CLIENT_HELLO.pack(
        b"roseinfe", handshake.PROTOCOL_VERSION, schema.schema(), handshake.Purpose.ENGINE
    )


def test_the_server_gets_the_reason_of_a_rejected_connection() -> None:
    async def work() -> None:
        async with handoff() as (made, peers, refused):
            one, other = tcp_pair()
            assert made.give(other)
            one.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while not refused:
                await asyncio.sleep(0.005)
            assert refused[0][1].startswith("it does not speak TLS") and not peers.take()
            one.close()

    asyncio.run(work())


def test_handshakes_in_progress_end_with_the_engine() -> None:
    async def work() -> None:
        one, other = tcp_pair()
        async with handoff() as (made, _, refused):
            assert made.give(other)
            await asyncio.sleep(0.05)
        one.settimeout(TIMEOUT_S)
        assert one.recv(10) == b"" and not refused
        one.close()

    asyncio.run(work())


def test_a_process_that_takes_no_connections_is_noticed() -> None:
    async def work() -> None:
        made = Handoff(lambda host, error: None)
        given = 0
        with contextlib.closing(socket.socket()) as connection:
            while made.give(connection.dup()):
                given += 1
                assert given < 10_000
        assert given >= 64
        made.close()

    asyncio.run(work())
