"""How two processes show each other that they know the secret and speak the same protocol, before anything else.

    gate -> client   magic, version, schema, 32 random bytes
    client -> gate   magic, version, schema, purpose, 32 random bytes, HMAC(secret, "client", all of the above)
    gate -> client   verdict, number of the engine's process, HMAC(secret, "gate", all of the above)

All fields have fixed places, so that nothing is parsed of somebody who has shown nothing yet. HMAC is that of RFC 2104
with SHA-256. The keys of the connection are HMACs of the same words with other labels, so each connection has its own.
"""

import asyncio
import contextlib
import hmac
import os
import socket
import struct
from enum import IntEnum
from hashlib import sha256
from typing import NamedTuple

from roseinfer.cluster.remote.schema import schema
from roseinfer.core.errors import EngineDeadError
from roseinfer.engine.remote.sealed import Keys
from roseinfer.engine.remote.secret import Secret

# Of the handshake and what follows it; messages are in the schema.
VERSION = 2
_MAGIC = b"roseinfe"
_GATE = struct.Struct("<8sH8s32s")
_CLIENT = struct.Struct("<8sH8sB32s")
_VERDICT = struct.Struct("<BQ")
_PROOF_BYTES = 32
_NONCE_BYTES = 32


class Purpose(IntEnum):
    """Of a connection: to the engine itself, to follow how it does, or none but to have it started anew."""

    ENGINE = 1
    FOLLOW = 2
    RENEW = 3


class Verdict(IntEnum):
    WELCOME = 0
    WRONG_VERSION = 1
    WRONG_SECRET = 2


class HandshakeError(EngineDeadError):
    """The other side does not accept us, or we do not accept it. `verdict`: None where nothing was said."""

    def __init__(self, message: str, verdict: Verdict | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict


class Greeted(NamedTuple):
    """A connection that is good. `number`: of the engine's process, see `EngineStatus`."""

    keys: Keys
    purpose: Purpose
    number: int


# --- the gate's side ------------------------------------------------------------------------------------------------
async def receive(connection: socket.socket, secret: Secret, number: int) -> Greeted:
    """Raises `HandshakeError` when the other side is refused, and has been told so; `OSError` if it is gone."""
    loop = asyncio.get_running_loop()
    ours = _GATE.pack(_MAGIC, VERSION, schema(), os.urandom(_NONCE_BYTES))
    await loop.sock_sendall(connection, ours)
    said = await _exactly(connection, _CLIENT.size + _PROOF_BYTES)
    theirs, proof = said[: _CLIENT.size], said[_CLIENT.size :]
    magic, version, known, wanted, _ = _CLIENT.unpack(theirs)
    if magic != _MAGIC:
        raise HandshakeError("it speaks another protocol")
    verdict = Verdict.WELCOME
    if (version, known) != (VERSION, schema()) or wanted not in set(Purpose):
        verdict = Verdict.WRONG_VERSION
    elif not hmac.compare_digest(proof, _proof(secret, b"client", ours + theirs)):
        verdict = Verdict.WRONG_SECRET
    if verdict is not Verdict.WELCOME:
        with contextlib.suppress(OSError):  # it is gone, and was none of ours
            await loop.sock_sendall(connection, _VERDICT.pack(verdict, 0) + bytes(_PROOF_BYTES))
    if verdict is Verdict.WRONG_VERSION:
        raise HandshakeError(f"it has {_shown(version, known)}, this is {_shown(VERSION, schema())}", verdict)
    if verdict is Verdict.WRONG_SECRET:
        raise HandshakeError("it has another secret", verdict)
    words = ours + said
    answer = _VERDICT.pack(verdict, number)
    await loop.sock_sendall(connection, answer + _proof(secret, b"gate", words + answer))
    return Greeted(_keys(secret, words, to_engine=False), Purpose(wanted), number)


# --- the client's side ----------------------------------------------------------------------------------------------
async def introduce(connection: socket.socket, secret: Secret, purpose: Purpose) -> Greeted:
    """Raises `HandshakeError` when either side refuses the other, `OSError` if that is gone."""
    loop = asyncio.get_running_loop()
    theirs = await _exactly(connection, _GATE.size)
    magic, version, known, _ = _GATE.unpack(theirs)
    if magic != _MAGIC:
        raise HandshakeError("what answers there is no engine of roseinfer")
    if (version, known) != (VERSION, schema()):
        message = f"the engine has {_shown(version, known)}, this is {_shown(VERSION, schema())}"
        raise HandshakeError(f"{message}: install the same version of roseinfer on both", Verdict.WRONG_VERSION)
    ours = _CLIENT.pack(_MAGIC, VERSION, schema(), purpose, os.urandom(_NONCE_BYTES))
    words = theirs + ours + _proof(secret, b"client", theirs + ours)
    await loop.sock_sendall(connection, words[len(theirs) :])
    answer = await _exactly(connection, _VERDICT.size + _PROOF_BYTES)
    code, number = _VERDICT.unpack(answer[: _VERDICT.size])
    if code != Verdict.WELCOME:
        if code == Verdict.WRONG_SECRET:
            raise HandshakeError("the engine has another secret", Verdict.WRONG_SECRET)
        raise HandshakeError("the engine speaks another version of the protocol", Verdict.WRONG_VERSION)
    if not hmac.compare_digest(answer[_VERDICT.size :], _proof(secret, b"gate", words + answer[: _VERDICT.size])):
        raise HandshakeError("what answers there does not know the secret", Verdict.WRONG_SECRET)
    return Greeted(_keys(secret, words, to_engine=True), purpose, number)


# --- both -----------------------------------------------------------------------------------------------------------
async def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes, and none behind them is taken."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            raise ConnectionResetError("the other side hung up")
        data += more
    return data


def _proof(secret: Secret, label: bytes, words: bytes) -> bytes:
    return hmac.digest(secret.value, label + b"\0" + words, sha256)


def _keys(secret: Secret, words: bytes, *, to_engine: bool) -> Keys:
    """`to_engine`: ours is the end that speaks to the engine."""
    there, back = _proof(secret, b"to the engine", words), _proof(secret, b"from the engine", words)
    return Keys(there, back) if to_engine else Keys(back, there)


def _shown(version: int, known: bytes) -> str:
    return f"protocol {version}.{known.hex()}"
