"""The connection over which a client sends requests to an engine on another host."""

import asyncio
from typing import Protocol

from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.connect import Connected, connect
from roseinfer.cluster.remote.handshake import HandshakeError, Purpose
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.core.promise import Promise
from roseinfer.engine.messages import EngineMessage, PromiseUpdate
from roseinfer.engine.transport import ConnectionTransport, EngineConnection, OnDeath, OnMessage

# An engine that does not read is given up when this much waits to be sent.
MAX_UNSENT_BYTES = 2**28
# A longer round trip was not the network's: this process had other work.
MAX_ROUND_TRIP_S = 0.3


class TransportListener(Protocol):
    """Receiver of what comes over the connection besides answers."""

    def connected(self, transport: "TlsTransport", number: int) -> None:
        """`number`: of the engine's process, see `EngineStatus`."""
        ...

    def promised(self, promise: Promise, age_s: float) -> None: ...

    def refused(self, error: HandshakeError) -> None: ...


class TlsTransport(ConnectionTransport):
    """An engine that an `EngineServer` at `address` owns."""

    def __init__(
        self, address: HostPort, tls: TlsFolder, listener: TransportListener, server_name: str | None = None
    ) -> None:
        super().__init__()
        self._address = address
        self._server_name = server_name
        self._tls = tls
        self._listener = listener

    async def open(self, on_message: OnMessage, on_death: OnDeath) -> EngineConnection:
        try:
            connected = await connect(self._address, self._tls, Purpose.ENGINE, self._server_name)
        except HandshakeError as error:
            self._listener.refused(error)
            raise
        try:
            link = await self._link_over(connected, on_message, on_death)
        except BaseException:
            connected.socket.close()
            raise
        self._listener.connected(self, connected.peer.number)
        return link

    async def _link_over(self, connected: Connected, on_message: OnMessage, on_death: OnDeath) -> EngineConnection:
        take = self._without_promises(on_message, connected.round_trip_s)
        link = EngineConnection(take, on_death, connected.peer.frames, MAX_UNSENT_BYTES)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=connected.socket)
        link.data_received(b"")  # what came together with the end of the handshake
        return link

    def _without_promises(self, on_message: OnMessage, round_trip_s: float) -> OnMessage:
        """Pass on messages, except promises, which go to the listener.

        A promise does not count what was on its way to the engine, or was sent while the promise came here. So its age
        grows by both ways.
        """
        older_s = min(round_trip_s, MAX_ROUND_TRIP_S)

        def take(message: EngineMessage) -> None:
            if isinstance(message, PromiseUpdate):
                self._listener.promised(message.promise, message.age_s + older_s)
            else:
                on_message(message)

        return take

    def cut(self, reason: str) -> None:
        """End the connection to an engine that was silent for too long: its requests end, or continue elsewhere."""
        if self._link is not None:
            self._link.fail(reason)
            self._link.close()
