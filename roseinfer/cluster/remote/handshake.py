"""Handshake of two hosts: the purpose of the connection in plain text, TLS, then the versions of both sides.

    client -> server   in plain text: magic, purpose
    both               TLS 1.3; each verifies the other's certificate
    client -> server   magic, version, schema, purpose
    server -> client   magic, version, schema, verdict, number of the engine's process

The purpose comes before TLS because TLS must end in the process that reads the connection: the engine's own process,
or the server of its status. It is repeated within TLS, where an attacker cannot change it. All fields have fixed sizes.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from enum import IntEnum
from typing import NamedTuple

from roseinfer.cluster.remote.schema import schema
from roseinfer.cluster.remote.tls import TlsContexts, TlsFrames, TlsSession, explain
from roseinfer.core.errors import EngineDeadError

# Version of this exchange and of what follows it; messages are in the schema.
PROTOCOL_VERSION = 3
_MAGIC = b"roseinfe"
_PREAMBLE = struct.Struct("<8sB")
CLIENT_HELLO = struct.Struct("<8sH8sB")
SERVER_HELLO = struct.Struct("<8sH8sBQ")


class Purpose(IntEnum):
    """Purpose of a connection: requests to the engine, its status, or only to have it restarted."""

    ENGINE = 1
    STATUS = 2
    RESTART = 3


class HandshakeResult(IntEnum):
    ACCEPTED = 0
    WRONG_VERSION = 1


class Refusal(IntEnum):
    """Reason why a connection was rejected, so that each cause is logged once."""

    PROTOCOL = 0
    CERTIFICATE = 1
    VERSION = 2
    TIMEOUT = 3
    CLOSED = 4
    BUSY = 5


class HandshakeError(EngineDeadError):
    """The other side rejected us, or we rejected it."""

    def __init__(self, message: str, refusal: Refusal = Refusal.PROTOCOL) -> None:
        super().__init__(message)
        self.refusal = refusal


class VerifiedPeer(NamedTuple):
    """A connection that both sides accepted. `number`: of the engine's process, see `EngineStatus`."""

    frames: TlsFrames
    purpose: Purpose
    number: int


# --- the server's side ----------------------------------------------------------------------------------------------
async def read_purpose(connection: socket.socket) -> Purpose:
    """Read the plain text before TLS. Raise `HandshakeError` if it is invalid, `OSError` if the client is gone."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < _PREAMBLE.size:
        more = await loop.sock_recv(connection, _PREAMBLE.size - len(data))
        if not more:
            raise ConnectionResetError("the other side closed the connection")
        data += more
    magic, purpose = _PREAMBLE.unpack(data)
    if magic != _MAGIC or purpose not in set(Purpose):
        raise HandshakeError("it uses another protocol")
    return Purpose(purpose)


async def accept(connection: socket.socket, contexts: TlsContexts, purpose: Purpose, number: int) -> VerifiedPeer:
    """Complete the handshake after the purpose was read.

    Raise `HandshakeError` if a side rejects the other, `OSError` if the client is gone.
    """
    session = await _secured(connection, TlsSession(contexts))
    magic, version, known, repeated = CLIENT_HELLO.unpack(await _read(session, connection, CLIENT_HELLO.size))
    matches = (version, known) == (PROTOCOL_VERSION, schema())
    verdict = HandshakeResult.ACCEPTED if matches else HandshakeResult.WRONG_VERSION
    with contextlib.nullcontext() if matches else contextlib.suppress(OSError):
        await session.write(connection, SERVER_HELLO.pack(_MAGIC, PROTOCOL_VERSION, schema(), verdict, number))
    if magic != _MAGIC or (matches and repeated != purpose):
        raise HandshakeError("it uses another protocol")
    if not matches:
        raise HandshakeError(
            f"it has {_shown(version, known)}, this is {_shown(PROTOCOL_VERSION, schema())}", Refusal.VERSION
        )
    return VerifiedPeer(TlsFrames(session), purpose, number)


# --- the client's side ----------------------------------------------------------------------------------------------
async def introduce(
    connection: socket.socket, contexts: TlsContexts, server_name: str, purpose: Purpose
) -> VerifiedPeer:
    """Begin a connection. `server_name`: the host or identity that the engine's certificate must name.

    Raise `HandshakeError` if a side rejects the other, `OSError` if the server is gone.
    """
    await asyncio.get_running_loop().sock_sendall(connection, _PREAMBLE.pack(_MAGIC, purpose))
    session = await _secured(connection, TlsSession(contexts, server_name))
    await session.write(connection, CLIENT_HELLO.pack(_MAGIC, PROTOCOL_VERSION, schema(), purpose))
    magic, version, known, verdict, number = SERVER_HELLO.unpack(await _read(session, connection, SERVER_HELLO.size))
    if magic != _MAGIC:
        raise HandshakeError("the server at this address is not a roseinfer engine")
    if verdict != HandshakeResult.ACCEPTED or (version, known) != (PROTOCOL_VERSION, schema()):
        message = f"the engine has {_shown(version, known)}, this is {_shown(PROTOCOL_VERSION, schema())}"
        raise HandshakeError(f"{message}: install the same version of roseinfer on both", Refusal.VERSION)
    return VerifiedPeer(TlsFrames(session), purpose, number)


# --- both -----------------------------------------------------------------------------------------------------------
async def _secured(connection: socket.socket, session: TlsSession) -> TlsSession:
    try:
        await session.handshake(connection)
    except ssl.SSLError as error:
        raise _rejection(error) from error
    return session


async def _read(session: TlsSession, connection: socket.socket, size: int) -> bytes:
    """Read what follows the TLS handshake. A client learns only here that the server rejected its certificate."""
    try:
        return await session.read_exactly(connection, size)
    except ssl.SSLError as error:
        raise _rejection(error) from error


def _rejection(error: ssl.SSLError) -> HandshakeError:
    reason = error.reason or ""
    about_certificate = isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE" in reason or "_CA" in reason
    return HandshakeError(explain(error), Refusal.CERTIFICATE if about_certificate else Refusal.PROTOCOL)


def _shown(version: int, known: bytes) -> str:
    return f"protocol {version}.{known.hex()}"
