"""Server side of the engine's socket: many clients, read and written without waiting for any of them."""

import contextlib
import logging
import select
import socket
import time
from typing import Protocol

import msgspec

from roseinfer.core.promise import Promise
from roseinfer.engine.messages import (
    OWNER,
    Add,
    ClientMessage,
    Disconnected,
    EngineMessage,
    Invalid,
    PromiseUpdate,
    Received,
)
from roseinfer.processes.frames import HEADER_BYTES, FrameError, Frames, PlainFrames

log = logging.getLogger("roseinfer.engine")

READ_BYTES = 2**18
# A client with more unread bytes is disconnected.
MAX_UNSENT_BYTES = 2**28
# Minimum time between promises to other hosts, unless a step takes longer.
MIN_PROMISE_INTERVAL_S = 0.002
_BROKEN = select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerSource(Protocol):
    """Source of connections from other hosts, whose handshakes are complete."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has something to return."""
        ...

    def take(self) -> list[tuple[socket.socket, Frames]]: ...

    def close(self) -> None: ...


class _Client:
    """Connection of one client. `remote_frames`: framing of a client on another host; None for one on this host."""

    def __init__(self, number: int, connection: socket.socket, remote_frames: Frames | None = None) -> None:
        self.number = number
        self.socket = connection
        self.remote = remote_frames is not None
        self.frames = remote_frames or PlainFrames()
        self.unsent = bytearray()


class ClientSockets:
    """Inbox and outbox of the engine. Clients are numbered as they connect; the first, `messages.OWNER`, owns the
    engine.

    `send` writes in the engine's own thread: encoding the outputs of 256 requests takes 10 us and a write 3 us. A
    second thread would cost more in waits for the interpreter lock. Bytes that a socket does not take at once are
    written later, by `receive`.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._peers: PeerSource | None = None
        self._poll = select.poll()
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        self._clients: dict[int, _Client] = {}
        self._by_number: dict[int, _Client] = {}
        self._next_number = 0
        self._greetings: dict[type[EngineMessage], EngineMessage] = {}
        self._promise: Promise | None = None
        self._next_promise_s = 0.0
        self._disconnected: list[int] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decode = msgspec.msgpack.Decoder(ClientMessage).decode
        self._buffer = bytearray()

    def accept_peers(self, peers: PeerSource) -> None:
        """Serve clients on other hosts too. `close` closes `peers`."""
        self._peers = peers
        self._poll.register(peers, select.POLLIN)

    @property
    def owned(self) -> bool:
        """True while the owner is connected, and before it connects."""
        return OWNER in self._by_number or not self._next_number

    def receive(self, timeout_s: float) -> list[Received]:
        received: list[Received] = []
        for descriptor, event in self._poll.poll(max(0.0, timeout_s * 1000)):
            client = self._clients.get(descriptor)
            if client is None:
                self._accept()
                continue
            if event & select.POLLOUT:
                self._flush(client)
            if event & (select.POLLIN | _BROKEN):
                self._read(client, received)
        if self._disconnected:
            received += [(number, Disconnected()) for number in self._disconnected]
            self._disconnected.clear()
        return received

    def send(self, client: int, message: EngineMessage) -> None:
        """Send a message. Drop it if the client has disconnected."""
        found = self._by_number.get(client)
        if found is not None:
            self._write(found, self._encode(message))

    def broadcast(self, message: EngineMessage, exclude: int | None = None) -> None:
        data = self._encode(message)
        for client in list(self._by_number.values()):
            if client.number != exclude:
                self._write(client, data)

    def publish(self, promise: Promise) -> None:
        """Send the promise to clients on other hosts, at most once per interval. A client that connects later gets the
        newest one.
        """
        self._promise = promise
        peers = [client for client in self._by_number.values() if client.remote]
        now_s = time.monotonic()
        if not peers or (now_s < self._next_promise_s and 0 < promise.step_s < MIN_PROMISE_INTERVAL_S):
            return
        self._next_promise_s = now_s + MIN_PROMISE_INTERVAL_S
        data = self._encode(_with_age(promise, now_s))
        for peer in peers:
            self._write(peer, data)

    def greet(self, message: EngineMessage, change: EngineMessage | None = None) -> None:
        """Send a message, or `change` in its place, to every client. Clients that connect later get the newest message
        of each type.
        """
        self._accept()
        self.broadcast(change or message)
        self._greetings[type(message)] = message

    def close(self, timeout_s: float) -> None:
        """Write what is left for at most `timeout_s` seconds, then close all sockets."""
        deadline_s = time.monotonic() + timeout_s
        for client in self._by_number.values():
            client.socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            with contextlib.suppress(OSError):
                client.socket.sendall(client.unsent)
            client.socket.close()
        self._by_number.clear()
        self._clients.clear()
        self._listener.close()
        if self._peers is not None:
            self._peers.close()

    # --- connections --------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._admit(connection)
        # Clients on other hosts come last: the first client of the listener owns the engine.
        if self._peers is not None and self._next_number:
            for connection, frames in self._peers.take():
                self._admit(connection, frames)

    def _admit(self, connection: socket.socket, remote_frames: Frames | None = None) -> None:
        client = _Client(self._next_number, connection, remote_frames)
        self._next_number += 1
        self._clients[connection.fileno()] = self._by_number[client.number] = client
        self._poll.register(connection, select.POLLIN)
        for greeting in self._greetings.values():
            self._write(client, self._encode(greeting))
        if client.remote and self._promise is not None:
            self._write(client, self._encode(_with_age(self._promise, time.monotonic())))

    def _drop(self, client: _Client) -> None:
        if self._by_number.pop(client.number, None) is None:
            return
        self._poll.unregister(client.socket)
        del self._clients[client.socket.fileno()]
        client.socket.close()
        self._disconnected.append(client.number)

    # --- reading ------------------------------------------------------------------------------------------------
    def _read(self, client: _Client, received: list[Received]) -> None:
        while client.number in self._by_number:
            try:
                data = client.socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            try:
                received += [(client.number, self._message(client, frame)) for frame in client.frames.feed(data)]
            # Deeply nested lists raise a RecursionError in the decoder.
            except (FrameError, msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
                log.warning("disconnecting a client that sent an invalid message: %s", error)
                data = b""
            if not data:
                self._drop(client)
            elif len(data) < READ_BYTES:
                return

    def _message(self, client: _Client, data: bytes) -> ClientMessage | Invalid:
        try:
            message = self._decode(data)
        except msgspec.ValidationError as error:
            kind, name, *_ = msgspec.msgpack.decode(data)
            if kind != "add" or not isinstance(name, str):
                raise
            return Invalid(name, f"invalid request: {error}", None, None)
        if client.remote and isinstance(message, Add):
            message.sent_s = None  # the other host has another clock
        return message

    # --- writing ------------------------------------------------------------------------------------------------
    def _encode(self, message: EngineMessage) -> bytearray:
        """Return the message as a frame, valid until the next call."""
        self._encoder.encode_into(message, self._buffer, HEADER_BYTES)
        self._buffer[:HEADER_BYTES] = (len(self._buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
        return self._buffer

    def _write(self, client: _Client, data: bytes | bytearray) -> None:
        """Write a frame of `_encode`, as far as the socket takes it."""
        if client.remote:
            try:
                data = client.frames.wrap(bytes(data[HEADER_BYTES:]))
            except OverflowError as error:
                log.error("disconnecting a client on another host; cannot send a message: %s", error)
                self._drop(client)
                return
        sent = 0 if client.unsent else self._try_send(client, data)
        if sent == len(data):
            return
        client.unsent += data[sent:]
        self._poll.modify(client.socket, select.POLLIN | select.POLLOUT)
        if len(client.unsent) > MAX_UNSENT_BYTES:
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        del client.unsent[: self._try_send(client, client.unsent)]
        if not client.unsent:
            self._poll.modify(client.socket, select.POLLIN)

    def _try_send(self, client: _Client, data: bytes | bytearray) -> int:
        try:
            return client.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the connection is lost, which the next read reports


def _with_age(promise: Promise, now_s: float) -> PromiseUpdate:
    return PromiseUpdate(promise, max(0.0, now_s - promise.at_s))
