"""Two processes meet: they get on only if both know the secret and speak the same version."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from roseinfer.cluster.remote import schema
from roseinfer.engine.remote import handshake as module
from roseinfer.engine.remote.handshake import Greeted, HandshakeError, Purpose, Verdict, introduce, receive
from roseinfer.engine.remote.secret import Secret

SECRET, OTHER = Secret(b"sixteen bytes or more"), Secret(b"another one of such")
PATIENCE_S = 20.0


def meet(
    gate: Callable[[socket.socket], Awaitable[Any]], client: Callable[[socket.socket], Awaitable[Any]]
) -> tuple[Any, Any]:
    """What becomes of each side: its result, or what it raised."""

    async def both() -> tuple[Any, Any]:
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            other.setblocking(False)

            async def side(act: Callable[[socket.socket], Awaitable[Any]], end: socket.socket) -> Any:
                try:
                    return await act(end)
                finally:
                    end.close()

            async with asyncio.timeout(PATIENCE_S):
                results = await asyncio.gather(side(gate, one), side(client, other), return_exceptions=True)
            return results[0], results[1]

    return asyncio.run(both())


def gate(secret: Secret = SECRET, number: int = 3) -> Callable[[socket.socket], Awaitable[Greeted]]:
    return lambda end: receive(end, secret, number)


def client(secret: Secret = SECRET, purpose: Purpose = Purpose.ENGINE) -> Callable[[socket.socket], Awaitable[Greeted]]:
    return lambda end: introduce(end, secret, purpose)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_who_knows_the_secret_is_let_in(purpose: Purpose) -> None:
    here, there = meet(gate(), client(purpose=purpose))
    assert here.purpose is there.purpose is purpose and there.number == 3
    assert here.keys.sending == there.keys.receiving and here.keys.receiving == there.keys.sending
    assert here.keys.sending != here.keys.receiving
    assert meet(gate(), client())[0].keys != here.keys, "each connection has keys of its own"


def test_who_has_another_secret_is_refused_and_told() -> None:
    here, there = meet(gate(), client(OTHER))
    assert isinstance(here, HandshakeError) and here.verdict is Verdict.WRONG_SECRET
    assert isinstance(there, HandshakeError) and str(there) == "the engine has another secret"


def test_a_gate_that_does_not_know_the_secret_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def bluffing(end: socket.socket) -> None:
        """It lets everybody in, and says so with what it cannot compute."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(end, module._GATE.pack(b"roseinfe", module.VERSION, schema.schema(), bytes(32)))
        await loop.sock_recv(end, 4096)
        await loop.sock_sendall(end, module._VERDICT.pack(Verdict.WELCOME, 0) + bytes(32))

    _, there = meet(bluffing, client())
    assert isinstance(there, HandshakeError) and "does not know the secret" in str(there)


def test_an_echo_is_no_proof() -> None:
    """Who sends our own words back to us has shown nothing."""

    async def echo(end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(end, 2 * await loop.sock_recv(end, 4096))

    here, _ = meet(gate(), echo)
    assert isinstance(here, HandshakeError)


def test_another_version_is_refused_by_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = module._CLIENT.pack(b"roseinfe", module.VERSION + 1, schema.schema(), Purpose.ENGINE, bytes(32))

    async def newer_client(end: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        await loop.sock_recv(end, 4096)
        await loop.sock_sendall(end, ours + bytes(32))
        return (await loop.sock_recv(end, 4096))[0]

    here, there = meet(gate(), newer_client)
    assert isinstance(here, HandshakeError) and here.verdict is Verdict.WRONG_VERSION
    assert there == Verdict.WRONG_VERSION

    async def older_gate(end: socket.socket) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(end, module._GATE.pack(b"roseinfe", module.VERSION, b"12345678", bytes(32)))
        return await loop.sock_recv(end, 4096)

    here, there = meet(older_gate, client())
    assert isinstance(there, HandshakeError) and "install the same version" in str(there)
    assert here == b"", "it is told nothing of the secret"


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"roseinfe" * 30], ids=len)
def test_who_is_no_peer_of_ours_is_refused(said: bytes) -> None:
    async def stranger(end: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(end, said)

    here, _ = meet(gate(), stranger)
    assert isinstance(here, HandshakeError | OSError)
    _, there = meet(stranger, client())
    assert isinstance(there, HandshakeError | OSError)


def test_the_schema_changes_with_what_messages_have() -> None:
    first = msgspec.defstruct("Add", [("a", int), ("b", int)], tag="add", array_like=True)
    exchanged = msgspec.defstruct("Add", [("b", int), ("a", int)], tag="add", array_like=True)
    nested = msgspec.defstruct("Add", [("a", int), ("b", list[first])], tag="add", array_like=True)  # type: ignore[valid-type]
    deeper = msgspec.defstruct("Add", [("a", int), ("b", list[exchanged])], tag="add", array_like=True)  # type: ignore[valid-type]
    assert len({schema.digest(kind) for kind in (first, exchanged, nested, deeper)}) == 4
    assert schema.digest(first) == schema.digest(first)
