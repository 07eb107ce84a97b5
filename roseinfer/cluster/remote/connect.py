"""Connect to an engine on another host, and complete the handshake."""

import asyncio
import socket
from typing import NamedTuple

from roseinfer.cluster.remote import tcp
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.handshake import Purpose, VerifiedPeer, introduce
from roseinfer.cluster.remote.tls import TlsFolder


class Connected(NamedTuple):
    """`round_trip_s`: about how long a packet takes there and back."""

    socket: socket.socket
    peer: VerifiedPeer
    round_trip_s: float


async def connect(address: HostPort, tls: TlsFolder, purpose: Purpose, server_name: str | None = None) -> Connected:
    """Return a connection that both sides accept. `server_name`: what the engine's certificate must name; None: the
    host.

    Raise `HandshakeError` if a side rejects the other, `OSError` if there is no answer.
    """
    connection, round_trip_s = await tcp.connect(address)
    try:
        async with asyncio.timeout(tcp.HANDSHAKE_TIMEOUT_S):
            peer = await introduce(connection, tls.contexts(), server_name or address.host, purpose)
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no handshake within {tcp.HANDSHAKE_TIMEOUT_S:g} s") from None
        raise
    return Connected(connection, peer, round_trip_s)
