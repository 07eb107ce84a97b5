"""Handover of connections from the manager to a worker.

A connection travels with one byte, and the worker replies with one byte: it has taken the connection, or the kernel
dropped it as the worker had no descriptor left. Until then the manager keeps its own copy, so that a connection that a
full, hung or dead worker never took can go to another.
"""

import contextlib
import socket
from collections import deque
from dataclasses import dataclass, field

_HANDED, _TAKEN, _REFUSED = b"c", b"y", b"n"
# All replies fit into the socket: a Unix socket holds some 270 small messages by default.
MAX_UNCONFIRMED = 128


@dataclass(slots=True)
class HandoverReplies:
    """Replies of a worker since the last call. `taken`: number of connections; `closed`: its end is closed."""

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
        """Send a connection, which is ours from then on. Return False if the worker has ended or too many wait."""
        if len(self._unconfirmed) >= MAX_UNCONFIRMED:
            return False
        try:
            socket.send_fds(self._end, [_HANDED], [connection.fileno()])
        except OSError:
            return False
        self._unconfirmed.append(connection)
        return True

    def replies(self) -> HandoverReplies:
        """Read replies, and close our copies of connections that were taken. Refused ones are the caller's."""
        replies = HandoverReplies()
        with contextlib.suppress(BlockingIOError):
            data = self._receive()
            replies.closed = not data
            for reply in data:
                connection = self._unconfirmed.popleft()
                if reply == _TAKEN[0]:
                    connection.close()
                    replies.taken += 1
                else:
                    replies.refused.append(connection)
        return replies

    def _receive(self) -> bytes:
        try:
            return self._end.recv(MAX_UNCONFIRMED)
        except ConnectionError:  # the worker ended with unread connections
            return b""

    def take_back(self) -> list[socket.socket]:
        """Return the connections that a worker never took, which has ended. They are the caller's."""
        refused = self.replies().refused
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
        """Return the connections that have come, and how many were dropped for want of a descriptor."""
        taken: list[socket.socket] = []
        replies = bytearray()
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                # One byte at a time: descriptors of bytes that are read together could be lost.
                data, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
                if not data:
                    break
                taken += [socket.socket(fileno=descriptor) for descriptor in descriptors]
                replies += _TAKEN if descriptors else _REFUSED
        if replies:
            with contextlib.suppress(OSError):  # the manager has ended, and this process ends soon
                self._end.send(replies)
        return taken, len(replies) - len(taken)

    def close(self) -> None:
        self._end.close()
