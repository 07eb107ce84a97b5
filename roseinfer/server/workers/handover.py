"""Connections on their way from the manager to a worker.

A connection is handed over with one byte, and the worker answers with one: it has it, or it had no descriptor left and
the kernel dropped it. Until then the manager keeps its own copy, so that what a full, hung or dead worker never took
can be given to another.
"""

import contextlib
import socket
from collections import deque
from dataclasses import dataclass, field

_HANDED, _TAKEN, _REFUSED = b"c", b"y", b"n"
# So few that the answers always fit the socket: a Unix socket takes some 270 small messages by default.
MAX_UNCONFIRMED = 128


@dataclass(slots=True)
class Answers:
    """What a worker has said since it was last asked: how many connections it took, which it could not take, and
    whether its end is closed."""

    taken: int = 0
    refused: list[socket.socket] = field(default_factory=list)
    closed: bool = False


class ConnectionSender:
    """The manager's end."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unconfirmed: deque[socket.socket] = deque()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, connection: socket.socket) -> bool:
        """Hand a connection over and own it from then on; False if the worker has too many waiting or is gone."""
        if len(self._unconfirmed) >= MAX_UNCONFIRMED:
            return False
        try:
            socket.send_fds(self._end, [_HANDED], [connection.fileno()])
        except OSError:
            return False
        self._unconfirmed.append(connection)
        return True

    def answers(self) -> Answers:
        """What has been said; the copies of connections that were taken are closed, refused ones are the caller's."""
        answers = Answers()
        with contextlib.suppress(BlockingIOError):
            data = self._receive()
            answers.closed = not data
            for answer in data:
                connection = self._unconfirmed.popleft()
                if answer == _TAKEN[0]:
                    connection.close()
                    answers.taken += 1
                else:
                    answers.refused.append(connection)
        return answers

    def _receive(self) -> bytes:
        try:
            return self._end.recv(MAX_UNCONFIRMED)
        except ConnectionError:  # it ended with connections unread
            return b""

    def take_back(self) -> list[socket.socket]:
        """The connections that the worker, which is gone, never took; they are the caller's."""
        refused = self.answers().refused
        left, self._unconfirmed = self._unconfirmed, deque()
        return [*refused, *left]

    def close(self) -> None:
        while self._unconfirmed:
            self._unconfirmed.popleft().close()
        self._end.close()


class ConnectionReceiver:
    """A worker's end."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def receive(self) -> tuple[list[socket.socket], int]:
        """The connections that have come, and how many were lost because this process has no descriptor left."""
        taken: list[socket.socket] = []
        answers = bytearray()
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                # A byte each: descriptors that come with bytes read together could be lost.
                data, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
                if not data:
                    break
                taken += [socket.socket(fileno=descriptor) for descriptor in descriptors]
                answers += _TAKEN if descriptors else _REFUSED
        if answers:
            with contextlib.suppress(OSError):  # the manager is gone, and so are we in a moment
                self._end.send(answers)
        return taken, len(answers) - len(taken)

    def close(self) -> None:
        self._end.close()
