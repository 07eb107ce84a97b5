"""The engine's side of connections from other hosts: what it takes, what it tells, what it lets go."""

import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.promise import Promise
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.messages import (
    OWNER,
    Abort,
    Add,
    Disconnected,
    Drain,
    EngineMessage,
    Heartbeat,
    Invalid,
    PromiseUpdate,
    Received,
    Shutdown,
)
from roseinfer.engine.remote.door import door, pass_on
from roseinfer.engine.remote.sealed import MAX_FRAME_BYTES, Keys, SealedFrames
from roseinfer.engine.sockets import ClientSockets
from roseinfer.processes.frames import frame

PATIENCE_S = 10.0
OURS, THEIRS = b"o" * 32, b"t" * 32


class Peer:
    """A client on another host, as far as the engine knows."""

    def __init__(self, outside: socket.socket) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE_S)
        with theirs:
            theirs.setblocking(False)
            assert pass_on(outside, theirs, Keys(OURS, THEIRS))
        self.frames = SealedFrames(Keys(THEIRS, OURS))
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


class Place:
    def __init__(self, path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        self.outside, inside = door()
        self.clients = ClientSockets(listener, inside)
        self.owner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.owner.connect(str(path))

    def peer(self) -> Peer:
        peer = Peer(self.outside)
        self.clients.receive(0.0)
        return peer

    def receive(self, count: int) -> list[Received]:
        received: list[Received] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(received) < count:
            received += self.clients.receive(0.05)
            assert time.monotonic() < deadline_s
        return received

    def close(self) -> None:
        self.clients.close(0.0)
        self.outside.close()
        self.owner.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "engine")
    yield made
    made.close()


BEAT = Heartbeat(SchedulerStats(), 1.0)
ADD = Add("r", Prompt([1, 2], SamplingParams()), age_s=0.5, sent_s=123.0)


def test_peers_are_served_like_clients_of_this_host_but_never_own_the_engine(place: Place) -> None:
    peer = place.peer()
    peer.send(ADD)
    peer.send(Shutdown())
    [(first, add), (second, shutdown)] = place.receive(2)
    assert first == second != OWNER and isinstance(shutdown, Shutdown)
    assert isinstance(add, Add) and add.request_id == "r"
    assert add.sent_s is None and add.age_s == 0.5, "its clock is another one"
    place.clients.send(first, BEAT)
    assert peer.read() == BEAT
    peer.socket.close()
    assert place.receive(1) == [(first, Disconnected())]


def test_whoever_was_passed_on_before_the_owner_was_accepted_is_no_owner(place: Place) -> None:
    peer = Peer(place.outside)  # and nobody has looked yet
    peer.send(Abort([]))
    assert place.receive(1) == [(OWNER + 1, Abort([]))]


def test_a_peer_that_comes_while_the_engine_loads_is_greeted_when_it_has(place: Place) -> None:
    peer = Peer(place.outside)
    place.clients.greet(BEAT)
    assert peer.read() == BEAT
    later = place.peer()
    assert later.read() == BEAT


def test_peers_are_told_promises_with_their_age_and_not_too_often(place: Place) -> None:
    place.owner.setblocking(False)
    peer = place.peer()
    began_s = time.monotonic()
    place.clients.publish(Promise(began_s - 2.0, step_s=0.5, running=3))
    promised = peer.read()
    assert isinstance(promised, PromiseUpdate) and promised.promise.running == 3
    assert 2.0 <= promised.age_s <= 2.0 + time.monotonic() - began_s
    for step in range(100):
        place.clients.publish(Promise(time.monotonic(), step_s=1e-4, steps=step))
    place.clients.publish(Promise(time.monotonic(), steps=100))  # idle: nothing follows soon
    told = [promised]
    while told[-1].promise.steps < 100:
        message = peer.read()
        assert isinstance(message, PromiseUpdate)
        told.append(message)
    assert len(told) < 60, "steps that are over in no time are not told one by one"
    with pytest.raises(BlockingIOError):
        place.owner.recv(1)  # who can read the board is told nothing


def test_a_peer_that_comes_late_is_told_the_newest_promise_at_once(place: Place) -> None:
    place.clients.greet(BEAT)
    place.clients.publish(Promise(time.monotonic() - 5.0, steps=7))
    peer = place.peer()
    assert peer.read() == BEAT
    promised = peer.read()
    assert isinstance(promised, PromiseUpdate) and promised.promise.steps == 7 and promised.age_s >= 5.0


@pytest.mark.parametrize("seed", range(8))
def test_bytes_that_are_no_message_end_that_peer_alone(
    place: Place, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    good, bad = place.peer(), place.peer()
    bad.socket.sendall(rng.randbytes(4)[:3] + b"\x00" + rng.randbytes(rng.randint(100, 100_000)))
    bad.socket.shutdown(socket.SHUT_WR)
    good.send(Abort(["x"]))
    received = place.receive(2)
    assert sorted(type(message).__name__ for _, message in received) == ["Abort", "Disconnected"]
    assert bad.cut
    assert len(caplog.messages) <= 1
    place.clients.broadcast(BEAT)
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
def test_a_sealed_frame_that_is_no_message_ends_that_peer_alone(place: Place, body: bytes) -> None:
    good, bad = place.peer(), place.peer()
    bad.socket.sendall(bad.frames.wrap(body))
    assert [message for _, message in place.receive(1)] == [Disconnected()]
    assert bad.cut
    good.send(Drain())
    assert [message for _, message in place.receive(1)] == [Drain()]


def test_a_request_that_cannot_be_read_is_refused_and_the_peer_stays(place: Place) -> None:
    peer = place.peer()
    peer.send(["add", "r", "no list", {}])
    [(number, rejected)] = place.receive(1)
    assert isinstance(rejected, Invalid) and rejected.request_id == "r"
    place.clients.send(number, rejected)
    assert peer.read() == rejected


def test_a_huge_frame_is_not_waited_for(place: Place) -> None:
    peer = place.peer()
    peer.socket.sendall((2**32 - 1).to_bytes(4, "little"))
    assert [message for _, message in place.receive(1)] == [Disconnected()]
    assert peer.cut


def test_a_message_that_is_too_long_for_a_peer_ends_that_peer_alone(place: Place) -> None:
    good, other = place.peer(), place.peer()
    good.send(Drain())
    [(number, _)] = place.receive(1)
    place.clients.send(number + 1, Invalid("r", "x" * MAX_FRAME_BYTES, None, None))
    assert place.receive(1) == [(number + 1, Disconnected())] and other.cut
    place.clients.broadcast(BEAT)
    assert good.read() == BEAT


def test_a_peer_without_keys_is_let_go_at_its_first_word(place: Place) -> None:
    peer = place.peer()
    peer.socket.sendall(frame(msgspec.msgpack.encode(Abort(["x"]))))
    assert [message for _, message in place.receive(1)] == [Disconnected()]


def test_a_door_that_nobody_looks_at_fills_and_says_so() -> None:
    outside, inside = door()
    one, other = socket.socketpair()
    with outside, inside, one, other:
        passed = 0
        while pass_on(outside, one, Keys(OURS, THEIRS)):
            passed += 1
            assert passed < 10_000
        assert passed >= 64
