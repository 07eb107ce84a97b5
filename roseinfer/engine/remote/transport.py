"""The way to an engine on another host."""

import asyncio
import socket
from typing import Protocol

from roseinfer.cluster.remote.address import HostPort
from roseinfer.core.promise import Promise
from roseinfer.engine.messages import EngineMessage, PromiseUpdate
from roseinfer.engine.remote import tcp
from roseinfer.engine.remote.handshake import Greeted, HandshakeError, Purpose
from roseinfer.engine.remote.sealed import SealedFrames
from roseinfer.engine.remote.secret import SecretSource
from roseinfer.engine.transport import ConnectionTransport, EngineConnection, OnDeath, OnMessage

# What waits to be sent to an engine that does not read.
MAX_UNSENT_BYTES = 2**28
# What took longer was not the network, but this process, which had other things to do.
MAX_ROUND_TRIP_S = 0.3


class Listener(Protocol):
    """Who is told of what comes by the connection, beside answers."""

    def connected(self, transport: "TcpTransport", number: int) -> None:
        """It leads to the engine's process of that number, see `EngineStatus`."""
        ...

    def promised(self, promise: Promise, age_s: float) -> None: ...

    def refused(self, error: HandshakeError) -> None: ...


class TcpTransport(ConnectionTransport):
    """An engine that a keeper at `address` owns. `listener` is told what is no answer."""

    def __init__(self, address: HostPort, secret: SecretSource, listener: Listener) -> None:
        super().__init__()
        self._where = address
        self._secret = secret
        self._listener = listener

    async def open(self, on_message: OnMessage, on_death: OnDeath) -> EngineConnection:
        try:
            connection, greeted, round_trip_s = await tcp.connect(self._where, self._secret.now(), Purpose.ENGINE)
        except HandshakeError as error:
            self._listener.refused(error)
            raise
        try:
            link = await self._link_over(connection, greeted, self._apart(on_message, round_trip_s), on_death)
        except BaseException:
            connection.close()
            raise
        self._listener.connected(self, greeted.number)
        return link

    async def _link_over(
        self, connection: socket.socket, greeted: Greeted, on_message: OnMessage, on_death: OnDeath
    ) -> EngineConnection:
        link = EngineConnection(on_message, on_death, SealedFrames(greeted.keys), MAX_UNSENT_BYTES)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=connection)
        return link

    def _apart(self, on_message: OnMessage, round_trip_s: float) -> OnMessage:
        """A promise knows nothing of what was on its way to the engine, nor of what was sent while it came here: so it
        is taken for one that is older by both ways, and nothing that it may not know of counts as known.
        """
        older_s = min(round_trip_s, MAX_ROUND_TRIP_S)

        def take(message: EngineMessage) -> None:
            if isinstance(message, PromiseUpdate):
                self._listener.promised(message.promise, message.age_s + older_s)
            else:
                on_message(message)

        return take

    def cut(self, reason: str) -> None:
        """For an engine that nobody has heard for too long: its requests end, or go on elsewhere."""
        if self._link is not None:
            self._link.die(reason)
            self._link.close()
