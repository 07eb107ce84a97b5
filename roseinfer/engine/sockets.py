"""The engine's side of its socket: any number of clients, read and written without ever waiting for one of them."""

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
# What a client that does not read may cost the engine before it counts as gone.
MAX_UNSENT_BYTES = 2**28
# Promises to other hosts come no closer than so many seconds, unless the step takes longer.
PROMISE_EVERY_S = 0.002
_BROKEN = select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerSource(Protocol):
    """Source of connections from other hosts, whose handshakes are complete."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has something to return."""
        ...

    def take(self) -> list[tuple[socket.socket, Frames]]: ...

    def close(self) -> None: ...


class _Client:
    """`remote_frames`: of a client on another host; None: it is on this one."""

    def __init__(self, number: int, connection: socket.socket, remote_frames: Frames | None = None) -> None:
        self.number = number
        self.socket = connection
        self.remote = remote_frames is not None
        self.frames = remote_frames or PlainFrames()
        self.unsent = bytearray()


class ClientSockets:
    """An inbox and an outbox. Clients are numbered as they connect; the first, `messages.OWNER`, owns the engine.

    Sending is done by whoever calls `send`, in the engine's own thread: encoding the outputs of 256 requests takes
    10 us and a write 3 us, less than a second thread would cost in waiting for the interpreter lock. What a socket
    does not take at once is kept and written while the loop turns.
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
        self._greeting: EngineMessage | None = None
        self._promise: Promise | None = None
        self._next_promise_s = 0.0
        self._gone: list[int] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decode = msgspec.msgpack.Decoder(ClientMessage).decode
        self._buffer = bytearray()

    def accept_peers(self, peers: PeerSource) -> None:
        """Serve clients on other hosts too. `close` closes `peers`."""
        self._peers = peers
        self._poll.register(peers, select.POLLIN)

    @property
    def owned(self) -> bool:
        """Whether the owner is connected, or has yet to be."""
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
        if self._gone:
            received += [(number, Disconnected()) for number in self._gone]
            self._gone.clear()
        return received

    def send(self, client: int, message: EngineMessage) -> None:
        """What goes to a client that has left is dropped."""
        found = self._by_number.get(client)
        if found is not None:
            self._write(found, self._encode(message))

    def broadcast(self, message: EngineMessage, but: int | None = None) -> None:
        data = self._encode(message)
        for client in list(self._by_number.values()):
            if client.number != but:
                self._write(client, data)

    def publish(self, promise: Promise) -> None:
        """Tell clients on other hosts, as often as they need it; who comes later is told the newest at once."""
        self._promise = promise
        peers = [client for client in self._by_number.values() if client.remote]
        now_s = time.monotonic()
        if not peers or (now_s < self._next_promise_s and 0 < promise.step_s < PROMISE_EVERY_S):
            return
        self._next_promise_s = now_s + PROMISE_EVERY_S
        data = self._encode(_as_of(promise, now_s))
        for peer in peers:
            self._write(peer, data)

    def greet(self, message: EngineMessage) -> None:
        """Tell every client, also those that are still to come."""
        self._accept()
        self.broadcast(message)
        self._greeting = message

    def close(self, patience_s: float) -> None:
        """Say what is left to say, as far as the clients take it within `patience_s` seconds."""
        deadline_s = time.monotonic() + patience_s
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
        # After these: the first client of the listener owns the engine.
        if self._peers is not None and self._next_number:
            for connection, frames in self._peers.take():
                self._admit(connection, frames)

    def _admit(self, connection: socket.socket, remote_frames: Frames | None = None) -> None:
        client = _Client(self._next_number, connection, remote_frames)
        self._next_number += 1
        self._clients[connection.fileno()] = self._by_number[client.number] = client
        self._poll.register(connection, select.POLLIN)
        if self._greeting is not None:
            self._write(client, self._encode(self._greeting))
        if client.remote and self._promise is not None:
            self._write(client, self._encode(_as_of(self._promise, time.monotonic())))

    def _drop(self, client: _Client) -> None:
        if self._by_number.pop(client.number, None) is None:
            return
        self._poll.unregister(client.socket)
        del self._clients[client.socket.fileno()]
        client.socket.close()
        self._gone.append(client.number)

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
            # A RecursionError is one of the decoder, at lists in lists in lists.
            except (FrameError, msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
                log.warning("a client of the engine is let go, as it says what nobody understands: %s", error)
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
            return Invalid(name, f"the request cannot be read: {error}", None, None)
        if client.remote and isinstance(message, Add):
            message.sent_s = None  # on another host's clock
        return message

    # --- writing ------------------------------------------------------------------------------------------------
    def _encode(self, message: EngineMessage) -> bytearray:
        """A frame, valid until the next call."""
        self._encoder.encode_into(message, self._buffer, HEADER_BYTES)
        self._buffer[:HEADER_BYTES] = (len(self._buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
        return self._buffer

    def _write(self, client: _Client, data: bytes | bytearray) -> None:
        """`data`: as `_encode` made it."""
        if client.remote:
            try:
                data = client.frames.wrap(bytes(data[HEADER_BYTES:]))
            except OverflowError as error:
                log.error("a client on another host is let go, as it could not be told: %s", error)
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
            return len(data)  # it is gone, as the next reading finds out


def _as_of(promise: Promise, now_s: float) -> PromiseUpdate:
    return PromiseUpdate(promise, max(0.0, now_s - promise.at_s))
