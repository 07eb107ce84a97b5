"""A client's connection to the status of an engine. It is opened again whenever it is lost."""

import asyncio
from typing import Protocol, cast

import msgspec

from roseinfer.cluster.remote import tcp
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.connect import connect
from roseinfer.cluster.remote.handshake import HandshakeError, Purpose
from roseinfer.cluster.remote.messages import StatusMessage, StatusUpdate
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.processes.frames import FrameError, Frames

# Delays between attempts to connect, at first and at most.
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 1.0


class StatusListener(Protocol):
    def updated(self, update: StatusUpdate) -> None: ...

    def refused(self, error: HandshakeError) -> None:
        """A handshake failed; it is tried again."""
        ...

    def unreachable(self, reason: str) -> None:
        """Nothing answers. Called once for each outage."""
        ...


class StatusSubscription:
    """Follow the status of the engine at `address` until `close`, whether it is there or not."""

    def __init__(self, address: HostPort, tls: TlsFolder, server_name: str | None, listener: StatusListener) -> None:
        self._address = address
        self._tls = tls
        self._server_name = server_name
        self._listener = listener
        self._connection: _StatusConnection | None = None
        self._outage_reported = False
        self._task = asyncio.get_running_loop().create_task(self._follow())

    @property
    def connected(self) -> bool:
        """True if there is a connection, and a status came over it."""
        connection = self._connection
        return connection is not None and connection.has_status and not connection.lost.is_set()

    async def _follow(self) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            try:
                await self._until_lost()
                delay_s = FIRST_RETRY_S
            except HandshakeError as error:
                self._listener.refused(error)
            except OSError as error:
                if not self._outage_reported:
                    self._outage_reported = True
                    self._listener.unreachable(tcp.reason(error))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)

    async def _until_lost(self) -> None:
        """Connect, and return when that connection has ended."""
        connected = await connect(self._address, self._tls, Purpose.STATUS, self._server_name)
        connection = _StatusConnection(self._listener, connected.peer.frames)
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=connected.socket)
        except BaseException:
            connected.socket.close()
            raise
        self._connection, self._outage_reported = connection, False
        connection.data_received(b"")  # what came together with the end of the handshake
        await connection.lost.wait()

    def cut(self, reason: str) -> None:
        """Give up a connection that is silent, and try a new one."""
        if self._connection is not None and not self._connection.lost.is_set():
            self._listener.unreachable(reason)
            self._connection.close()

    def close(self) -> None:
        self._task.cancel()
        if self._connection is not None:
            self._connection.close()


class _StatusConnection(asyncio.Protocol):
    def __init__(self, listener: StatusListener, frames: Frames) -> None:
        self.lost = asyncio.Event()
        self.has_status = False
        self._listener = listener
        self._frames = frames
        self._decode = msgspec.msgpack.Decoder(StatusMessage).decode
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                message = self._decode(body)
                self.has_status = True
                self._listener.updated(message)
        except (FrameError, msgspec.MsgspecError):
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
