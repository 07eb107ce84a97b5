"""Connections on their way to a worker are kept until it has them."""

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from roseinfer.server.workers.handover import MAX_UNCONFIRMED, ConnectionReceiver, ConnectionSender


class Pair:
    """A manager's and a worker's end, in one process."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        self.sender = ConnectionSender(ours)
        self.receiver = ConnectionReceiver(its)
        self.clients: list[socket.socket] = []
        self.taken: list[socket.socket] = []

    def connection(self) -> socket.socket:
        client, connection = socket.socketpair()
        self.clients.append(client)
        return connection

    def receive(self) -> int:
        taken, lost = self.receiver.receive()
        self.taken += taken
        return lost

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for connection in (*self.clients, *self.taken):
            connection.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_connection_is_the_workers_once_it_has_taken_it(pair: Pair) -> None:
    for _ in range(3):
        assert pair.sender.send(pair.connection())
    assert pair.receive() == 0 and len(pair.taken) == 3
    answers = pair.sender.answers()
    assert (answers.taken, answers.refused, answers.closed) == (3, [], False)
    pair.taken[0].close()
    pair.clients[0].settimeout(5)
    assert pair.clients[0].recv(1) == b"", "the manager's copy keeps no connection open"
    pair.taken[1].sendall(b"x")
    assert pair.clients[1].recv(1) == b"x"


def test_what_a_dead_worker_never_took_comes_back(pair: Pair) -> None:
    for _ in range(3):
        pair.sender.send(pair.connection())
    pair.taken += [pair.receiver.receive()[0].pop() for _ in range(1)]
    for _ in range(2):
        pair.sender.send(pair.connection())
    pair.receiver.close()
    back = pair.sender.take_back()
    assert len(back) == 2
    for connection, client in zip(back, pair.clients[3:], strict=True):
        connection.sendall(b"y")
        assert client.recv(1) == b"y"
        connection.close()
    assert pair.sender.answers().closed


def test_a_worker_without_descriptors_refuses_and_loses_nothing(pair: Pair) -> None:
    connections = [pair.connection() for _ in range(4)]
    for connection in connections:
        assert pair.sender.send(connection)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest descriptor that is free: what comes beyond it is too much
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        assert pair.receive() == 3, "one fits"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    answers = pair.sender.answers()
    assert answers.taken == 1 and len(answers.refused) == 3
    assert [again.fileno() for again in answers.refused] == [connection.fileno() for connection in connections[1:]]
    for connection in answers.refused:
        assert pair.sender.send(connection)
    assert pair.receive() == 0 and len(pair.taken) == 4


def test_only_so_many_are_on_their_way(pair: Pair) -> None:
    for _ in range(MAX_UNCONFIRMED):
        assert pair.sender.send(pair.connection())
    late = pair.connection()
    assert not pair.sender.send(late)
    pair.receive()
    assert pair.sender.answers().taken == MAX_UNCONFIRMED, "all answers fit the socket"
    assert pair.sender.send(late)
