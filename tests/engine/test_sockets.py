"""Sockets of the engine: several clients, slow ones, broken ones."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine import sockets
from roseinfer.engine.messages import (
    Abort,
    Add,
    Disconnected,
    EngineMessage,
    Failed,
    Heartbeat,
    Invalid,
    Received,
    Shutdown,
)
from roseinfer.engine.sockets import ClientSockets
from roseinfer.processes.frames import FrameReader, frame

PATIENCE_S = 10.0


class Peer:
    """Blocking end of a client."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(path))
        self._frames = FrameReader()
        self._received: list[bytes] = []

    def send(self, *messages: object) -> None:
        self.socket.sendall(b"".join(frame(msgspec.msgpack.encode(message)) for message in messages))

    def read(self) -> EngineMessage:
        while not self._received:
            data = self.socket.recv(65536)
            assert data, "the engine has hung up"
            self._received += self._frames.feed(data)
        return msgspec.msgpack.decode(self._received.pop(0), type=EngineMessage)

    def close(self) -> None:
        self.socket.close()


class Place:
    def __init__(self, path: Path) -> None:
        self._path = path
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        self.clients = ClientSockets(listener)
        self._peers: list[Peer] = []

    def connect(self) -> Peer:
        self._peers.append(Peer(self._path))
        return self._peers[-1]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self.clients.close(0.0)

    def receive(self, count: int) -> list[Received]:
        received: list[Received] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(received) < count:
            received += self.clients.receive(0.05)
            assert time.monotonic() < deadline_s
        return received


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "engine")
    yield made
    made.close()


def beat(step: int) -> Heartbeat:
    return Heartbeat(SchedulerStats(step=step), 1.0)


def test_messages_have_their_sender_and_answers_reach_it(place: Place) -> None:
    first, second = place.connect(), place.connect()
    first.send(Abort(["a"]), Abort(["b"]))
    second.send(Shutdown())
    received = place.receive(3)
    assert [(who, m.sequence_ids) for who, m in received if isinstance(m, Abort)] == [(0, ["a"]), (0, ["b"])]
    assert [who for who, m in received if isinstance(m, Shutdown)] == [1]
    place.clients.send(1, beat(1))
    place.clients.send(0, beat(2))
    place.clients.broadcast(beat(3), exclude=0)
    place.clients.broadcast(beat(4))
    assert [first.read().stats.step for _ in range(2)] == [2, 4]
    assert [second.read().stats.step for _ in range(3)] == [1, 3, 4]


def test_late_clients_are_greeted_too(place: Place) -> None:
    early = place.connect()
    place.clients.greet(Failed("hello"))
    late = place.connect()
    place.clients.receive(1.0)
    for peer in (early, late):
        assert peer.read() == Failed("hello")


def test_late_clients_get_all_of_which_early_ones_get_changes(place: Place) -> None:
    early = place.connect()
    place.clients.greet(Failed("hello"))
    place.clients.greet(beat(1), beat(2))
    place.clients.greet(beat(3), beat(4))
    late = place.connect()
    place.clients.receive(1.0)
    assert [early.read() for _ in range(3)] == [Failed("hello"), beat(2), beat(4)]
    assert [late.read() for _ in range(2)] == [Failed("hello"), beat(3)], (
        "the newest of each type, the first type first"
    )


def test_a_disconnected_client_is_reported_once_and_sent_nothing_more(place: Place) -> None:
    staying, leaving = place.connect(), place.connect()
    leaving.send(Abort(["last words"]))
    leaving.close()
    received = place.receive(2)
    assert [who for who, _ in received] == [1, 1]
    assert received[0][1] == Abort(["last words"]) and isinstance(received[1][1], Disconnected)
    place.clients.send(1, beat(1))
    place.clients.broadcast(beat(2))
    assert staying.read().stats.step == 2
    assert place.clients.receive(0.05) == []
    assert place.connect() and place.clients.receive(0.05) == []
    place.clients.send(2, beat(3))  # numbers are not used again


def test_a_slow_client_delays_no_other_and_misses_nothing(place: Place) -> None:
    slow, quick = place.connect(), place.connect()
    place.clients.receive(0.05)
    sent = [Failed("x" * 100_000 + str(i)) for i in range(20)]
    for message in sent:
        place.clients.broadcast(message)
        assert quick.read() == message
    reading = threading.Thread(target=lambda: read.extend(slow.read() for _ in sent))
    read: list[EngineMessage] = []
    reading.start()
    while reading.is_alive():  # what the socket did not take at once goes out while the loop turns
        place.clients.receive(0.01)
    assert read == sent


def test_a_client_that_never_reads_is_disconnected(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_UNSENT_BYTES", 1_000_000)
    place.connect()
    place.clients.receive(0.05)
    for _ in range(30):
        place.clients.send(0, Failed("x" * 100_000))
    assert place.receive(1) == [(0, Disconnected())]


def test_last_messages_are_sent_before_the_close(place: Place) -> None:
    peer = place.connect()
    place.clients.receive(0.05)
    sent = [Failed("x" * 100_000 + str(i)) for i in range(20)]
    for message in sent:
        place.clients.send(0, message)
    read: list[EngineMessage] = []
    reading = threading.Thread(target=lambda: read.extend(peer.read() for _ in sent))
    reading.start()
    place.clients.close(PATIENCE_S)
    reading.join(PATIENCE_S)
    assert read == sent


def test_an_unreadable_request_is_received_as_the_answer_to_it(place: Place) -> None:
    good = Add("good", Prompt([5, 6], SequenceParams()))
    worse = Add("worse", Prompt([5], SequenceParams(), RequestMeta(priority=0.5)))
    place.connect().send(Add("bad", Prompt([5, True], SequenceParams())), good, worse)
    bad, read, unread = [message for _, message in place.receive(3)]
    assert read == good
    for rejected, name in ((bad, "bad"), (unread, "worse")):
        assert isinstance(rejected, Invalid)
        assert rejected.request_id == name and "Expected `int`" in rejected.message
