"""Handshake of two hosts: they connect only with certificates of one CA, the right name, and the same version."""

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roseinfer.cluster.remote import handshake as module
from roseinfer.cluster.remote import schema
from roseinfer.cluster.remote.handshake import (
    HandshakeError,
    Purpose,
    Refusal,
    VerifiedPeer,
    accept,
    introduce,
    read_purpose,
)
from roseinfer.cluster.remote.tls import TlsContexts, TlsFolder, TlsSession
from tests.helpers.remote import authority, foreign_tls, own_tls, write_certificate

TIMEOUT_S = 20.0
Side = Callable[[socket.socket], Awaitable[Any]]


def meet(server: Side, client: Side) -> tuple[Any, Any]:
    """Return what each side returns or raises."""

    async def both() -> tuple[Any, Any]:
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            other.setblocking(False)

            async def side(act: Side, end: socket.socket) -> Any:
                try:
                    return await act(end)
                finally:
                    end.close()

            async with asyncio.timeout(TIMEOUT_S):
                results = await asyncio.gather(side(server, one), side(client, other), return_exceptions=True)
            return results[0], results[1]

    return asyncio.run(both())


def server(contexts: TlsContexts | None = None) -> Side:
    async def act(end: socket.socket) -> VerifiedPeer:
        return await accept(end, contexts or own_tls().contexts(), await read_purpose(end), 3)

    return act


def client(contexts: TlsContexts | None = None, *, name: str = "127.0.0.1", purpose: Purpose = Purpose.ENGINE) -> Side:
    return lambda end: introduce(end, contexts or own_tls().contexts(), name, purpose)


def preamble(purpose: int = Purpose.ENGINE, magic: bytes = b"roseinfe") -> bytes:
    return struct.pack("<8sB", magic, purpose)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_hosts_of_one_deployment_connect(purpose: Purpose) -> None:
    here, there = meet(server(), client(purpose=purpose))
    assert here.purpose is there.purpose is purpose and there.number == 3
    assert there.frames.feed(here.frames.wrap(b"a message")) == [b"a message"]


def test_a_host_of_another_ca_is_rejected_by_both_sides() -> None:
    here, there = meet(server(), client(foreign_tls().contexts()))
    assert isinstance(there, HandshakeError) and there.refusal is Refusal.CERTIFICATE
    assert str(there).startswith("its certificate is not signed by our CA")
    assert isinstance(here, HandshakeError) and here.refusal is Refusal.CERTIFICATE
    assert str(here) == "it does not accept our certificate: another CA signed it"


def trusting(contexts: TlsContexts, ca: str) -> TlsContexts:
    """Return contexts whose client trusts another CA, as an attacker's does."""
    contexts.client.load_verify_locations(cadata=authority(ca).certificate.decode())
    return contexts


def test_a_client_that_trusts_us_still_needs_a_certificate_of_our_ca(tmp_path: Path) -> None:
    attacker = trusting(TlsFolder(write_certificate(tmp_path, "foreign")).contexts(), "ours")
    here, there = meet(server(), client(attacker))
    assert isinstance(here, HandshakeError) and here.refusal is Refusal.CERTIFICATE
    assert "not signed by our CA" in str(here)
    assert isinstance(there, HandshakeError), "it learns nothing but that"
    assert str(there) == "it does not accept our certificate: another CA signed it"


def test_a_client_without_a_certificate_is_rejected() -> None:
    bare = ssl.create_default_context(cadata=authority().certificate.decode())
    contexts = own_tls().contexts()._replace(client=bare)
    here, there = meet(server(), client(contexts))
    assert isinstance(here, HandshakeError) and str(here) == "it presented no certificate"
    assert isinstance(there, HandshakeError) and str(there) == "it requires a certificate"


@pytest.mark.parametrize("name", ["127.0.0.2", "another-host", "engine-1"])
def test_a_host_whose_certificate_names_another_host_is_rejected(name: str) -> None:
    here, there = meet(server(), client(name=name))
    assert isinstance(there, HandshakeError) and there.refusal is Refusal.CERTIFICATE
    assert "its certificate is invalid" in str(there) and name in str(there)
    assert isinstance(here, HandshakeError)


@pytest.mark.parametrize("host", ["engine-0f", "node-7.example.org", "fd00::2", "10.0.0.2"])
def test_a_certificate_names_hosts_addresses_and_identities(host: str, tmp_path: Path) -> None:
    named = TlsFolder(write_certificate(tmp_path, host=host)).contexts()
    here, there = meet(server(named), client(name=host))
    assert isinstance(here, VerifiedPeer) and isinstance(there, VerifiedPeer)


def test_tls_1_2_is_rejected() -> None:
    old = ssl.create_default_context(cadata=authority().certificate.decode())
    old.load_cert_chain(own_tls().path / "tls.crt", own_tls().path / "tls.key")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    here, there = meet(server(), client(own_tls().contexts()._replace(client=old)))
    assert isinstance(here, HandshakeError) and str(here) == "it does not support TLS 1.3"
    assert isinstance(there, HandshakeError)


async def _hello(end: socket.socket, hello: bytes, sent: bytes) -> bytes:
    """Send these plain bytes and, after TLS, this hello. Return the answer."""
    await asyncio.get_running_loop().sock_sendall(end, sent)
    session = TlsSession(own_tls().contexts(), "127.0.0.1")
    await session.handshake(end)
    await session.write(end, hello)
    return await session.read_exactly(end, module.SERVER_HELLO.size)


def test_another_version_is_rejected_by_either_side() -> None:
    newer = module.CLIENT_HELLO.pack(b"roseinfe", module.PROTOCOL_VERSION + 1, schema.schema(), Purpose.ENGINE)
    here, there = meet(server(), partial(_hello, hello=newer, sent=preamble()))
    assert isinstance(here, HandshakeError) and here.refusal is Refusal.VERSION
    assert module.SERVER_HELLO.unpack(there)[3] == module.HandshakeResult.WRONG_VERSION

    async def older_server(end: socket.socket) -> None:
        assert await read_purpose(end) is Purpose.ENGINE
        session = TlsSession(own_tls().contexts())
        await session.handshake(end)
        await session.read_exactly(end, module.CLIENT_HELLO.size)
        await session.write(end, module.SERVER_HELLO.pack(b"roseinfe", module.PROTOCOL_VERSION, b"12345678", 0, 1))

    _, there = meet(older_server, client())
    assert isinstance(there, HandshakeError) and there.refusal is Refusal.VERSION
    assert "install the same version" in str(there)


def test_a_purpose_that_was_changed_in_transit_is_rejected() -> None:
    """The first copy is plain text. An attacker must not turn a status request into a restart."""
    hello = module.CLIENT_HELLO.pack(b"roseinfe", module.PROTOCOL_VERSION, schema.schema(), Purpose.STATUS)
    here, _ = meet(server(), partial(_hello, hello=hello, sent=preamble(Purpose.RESTART)))
    assert isinstance(here, HandshakeError) and here.refusal is Refusal.PROTOCOL


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(200),
        b"roseinfe" * 30,
        preamble() + b"GET / HTTP/1.1\r\n\r\n",
        preamble() + b"\x16\x03\x01\x02\x00" + bytes(512),
        preamble(9),
    ],
    ids=range(7),
)
def test_other_protocols_are_rejected(sent: bytes) -> None:
    async def stranger(end: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(end, sent)

    here, _ = meet(server(), stranger)
    assert isinstance(here, HandshakeError | OSError)
    _, there = meet(stranger, client())
    assert isinstance(there, HandshakeError | OSError)


def test_the_schema_changes_with_the_fields_of_messages() -> None:
    first = msgspec.defstruct("Add", [("a", int), ("b", int)], tag="add", array_like=True)
    exchanged = msgspec.defstruct("Add", [("b", int), ("a", int)], tag="add", array_like=True)
    nested = msgspec.defstruct("Add", [("a", int), ("b", list[first])], tag="add", array_like=True)  # type: ignore[valid-type]
    deeper = msgspec.defstruct("Add", [("a", int), ("b", list[exchanged])], tag="add", array_like=True)  # type: ignore[valid-type]
    assert len({schema.digest(kind) for kind in (first, exchanged, nested, deeper)}) == 4
    assert schema.digest(first) == schema.digest(first)
