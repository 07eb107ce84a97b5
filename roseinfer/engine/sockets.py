"""The engine's side of its socket: any number of clients, read and written without ever waiting for one of them."""

import contextlib
import select
import socket
import time

import msgspec

from roseinfer.engine.frames import HEADER_BYTES, FrameReader
from roseinfer.engine.messages import OWNER, ClientMessage, EngineMessage, Left, Received, Rejected

READ_BYTES = 2**18
# What a client that does not read may cost the engine before it counts as gone.
MAX_UNSENT_BYTES = 2**28
_BROKEN = select.POLLHUP | select.POLLERR | select.POLLNVAL


class _Client:
    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.socket = connection
        self.frames = FrameReader()
        self.unsent = bytearray()


class ClientSockets:
    """An inbox and an outbox. Clients are numbered as they connect; the first, `messages.OWNER`, owns the engine.

    Sending is done by whoever calls `send`, in the engine's own thread: encoding the outputs of 256 requests takes
    10 us and a write 3 us, less than a second thread would cost in waiting for the interpreter lock. What a socket
    does not take at once is kept and written while the loop turns.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._clients: dict[int, _Client] = {}
        self._by_number: dict[int, _Client] = {}
        self._next_number = 0
        self._greeting = b""
        self._gone: list[int] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decode = msgspec.msgpack.Decoder(ClientMessage).decode
        self._buffer = bytearray()

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
            received += [(number, Left()) for number in self._gone]
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

    def greet(self, message: EngineMessage) -> None:
        """Tell every client, also those that are still to come."""
        self._accept()
        self.broadcast(message)
        self._greeting = bytes(self._encode(message))

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

    # --- connections --------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                client = _Client(self._next_number, connection)
                self._next_number += 1
                self._clients[connection.fileno()] = self._by_number[client.number] = client
                self._poll.register(connection, select.POLLIN)
                if self._greeting:
                    self._write(client, self._greeting)

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
            received += [(client.number, self._message(frame)) for frame in client.frames.feed(data)]
            if not data:
                self._drop(client)
            elif len(data) < READ_BYTES:
                return

    def _message(self, data: bytes) -> ClientMessage | Rejected:
        try:
            return self._decode(data)
        except msgspec.ValidationError as error:
            kind, name, *_ = msgspec.msgpack.decode(data)
            if kind != "add" or not isinstance(name, str):
                raise
            return Rejected(name, f"the request cannot be read: {error}", None, None)

    # --- writing ------------------------------------------------------------------------------------------------
    def _encode(self, message: EngineMessage) -> bytearray:
        """A frame, valid until the next call."""
        self._encoder.encode_into(message, self._buffer, HEADER_BYTES)
        self._buffer[:HEADER_BYTES] = (len(self._buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
        return self._buffer

    def _write(self, client: _Client, data: bytes | bytearray) -> None:
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
