"""Handover of connections: the manager keeps them until the worker has them."""

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from roseinfer.server.workers.handover import MAX_UNCONFIRMED, ConnectionReceiver, ConnectionSender


class Pair:
    """The manager's and the worker's end, in one process."""

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


def test_the_manager_closes_its_copy_of_a_taken_connection(pair: Pair) -> None:
    for _ in range(3):
        assert pair.sender.send(pair.connection())
    assert pair.receive() == 0 and len(pair.taken) == 3
    replies = pair.sender.replies()
    assert (replies.taken, replies.refused, replies.closed) == (3, [], False)
    pair.taken[0].close()
    pair.clients[0].settimeout(5)
    assert pair.clients[0].recv(1) == b"", "the manager's copy keeps no connection open"
    pair.taken[1].sendall(b"x")
    assert pair.clients[1].recv(1) == b"x"


def test_connections_that_a_dead_worker_never_took_come_back(pair: Pair) -> None:
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
    assert pair.sender.replies().closed


def test_a_worker_without_descriptors_refuses_connections_and_loses_none(pair: Pair) -> None:
    connections = [pair.connection() for _ in range(4)]
    for connection in connections:
        assert pair.sender.send(connection)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest free descriptor, which becomes the highest allowed one
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        assert pair.receive() == 3, "one fits"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    replies = pair.sender.replies()
    assert replies.taken == 1 and len(replies.refused) == 3
    assert [again.fileno() for again in replies.refused] == [connection.fileno() for connection in connections[1:]]
    for connection in replies.refused:
        assert pair.sender.send(connection)
    assert pair.receive() == 0 and len(pair.taken) == 4


def test_the_number_of_unconfirmed_connections_is_bounded(pair: Pair) -> None:
    for _ in range(MAX_UNCONFIRMED):
        assert pair.sender.send(pair.connection())
    late = pair.connection()
    assert not pair.sender.send(late)
    pair.receive()
    assert pair.sender.replies().taken == MAX_UNCONFIRMED, "all replies fit into the socket"
    assert pair.sender.send(late)
