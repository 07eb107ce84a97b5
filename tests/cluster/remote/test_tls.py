"""Certificates on disk, and frames over TLS: what is accepted, and what ends a connection."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.cluster.remote.tls import TlsContexts, TlsFolder, TlsFrames, TlsSession
from roseinfer.core.errors import ConfigError
from roseinfer.processes.frames import FrameError
from tests.helpers.remote import authority, own_tls, write_certificate

TIMEOUT_S = 20.0


def sessions(server: TlsContexts | None = None, client: TlsContexts | None = None) -> tuple[TlsSession, TlsSession]:
    """Return both ends of a connection after their handshake, client first."""
    ends = TlsSession(client or own_tls().contexts(), "127.0.0.1"), TlsSession(server or own_tls().contexts())

    async def handshakes() -> None:
        sockets = socket.socketpair()
        with sockets[0], sockets[1]:
            for each in sockets:
                each.setblocking(False)
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*(end.handshake(each) for end, each in zip(ends, sockets, strict=True)))

    asyncio.run(handshakes())
    return ends


def frames(limit: int = 2**20) -> tuple[TlsFrames, TlsFrames]:
    client, server = sessions()
    return TlsFrames(client, limit), TlsFrames(server, limit)


# --- frames ---------------------------------------------------------------------------------------------------------
@given(st.lists(st.binary(max_size=40_000), max_size=6), st.integers(1, 5000))
@settings(max_examples=30, deadline=None)
def test_messages_arrive_in_order_in_pieces_of_any_size(messages: list[bytes], piece: int) -> None:
    client, server = FRAMES
    sent = b"".join(map(client.wrap, messages))
    received = [each for start in range(0, len(sent), piece) for each in server.feed(sent[start : start + piece])]
    assert received == messages
    assert client.feed(server.wrap(b"an answer")) == [b"an answer"]


FRAMES = frames()


def _flipped(records: list[bytes]) -> list[bytes]:
    draw = random.Random(len(records[0]))
    at = draw.randrange(5, len(records[0]))
    return [records[0][:at] + bytes([records[0][at] ^ 1 << draw.randrange(8)]) + records[0][at + 1 :], *records[1:]]


@pytest.mark.parametrize(
    "changed",
    [
        _flipped,
        lambda records: [records[0], records[0]],
        lambda records: records[::-1],
        lambda records: records[1:],
        lambda records: [(0).to_bytes(4, "little"), *records],
        lambda records: [b"plain text of somebody", *records],
    ],
    ids=["a bit", "repeated", "exchanged", "left out", "empty", "plain text"],
)
def test_changed_data_ends_the_connection(changed: Callable[[list[bytes]], list[bytes]]) -> None:
    client, server = frames()
    records = [client.wrap(b"first message"), client.wrap(b"second message")]
    with pytest.raises(FrameError):
        server.feed(b"".join(changed(records)))


def test_data_of_the_other_direction_is_rejected() -> None:
    client, _ = frames()
    with pytest.raises(FrameError):
        client.feed(client.wrap(b"an echo"))


def test_a_message_over_the_limit_is_neither_sent_nor_received() -> None:
    client, server = frames(limit=100)
    assert server.feed(client.wrap(b"x" * 100)) == [b"x" * 100]
    with pytest.raises(OverflowError, match="101 bytes"):
        client.wrap(b"x" * 101)
    unlimited, server_session = sessions()
    with pytest.raises(FrameError, match="too long"):
        TlsFrames(server_session, 100).feed(TlsFrames(unlimited).wrap(b"x" * 101))


@given(st.binary(min_size=1, max_size=2000))
@settings(max_examples=50, deadline=None)
def test_random_bytes_contain_no_message(data: bytes) -> None:
    _, server = frames(limit=1000)
    with contextlib.suppress(FrameError):
        assert server.feed(data) == []


def test_contents_are_not_readable_in_transit() -> None:
    client, _ = frames()
    assert b"a prompt" not in client.wrap(b"a prompt of somebody")


# --- files ----------------------------------------------------------------------------------------------------------
def test_files_of_cert_manager_are_valid_and_have_their_expiry_time(tmp_path: Path) -> None:
    write_certificate(tmp_path, days=10.0)
    assert {path.name for path in tmp_path.iterdir()} == {"ca.crt", "tls.crt", "tls.key"}
    expires_s = TlsFolder(tmp_path).contexts().expires_s
    assert abs(expires_s - time.time() - 10 * 86400) < 3600


def _mode(name: str, mode: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).chmod(mode)


def _text(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def _folder_instead(folder: Path) -> None:
    (folder / "tls.crt").unlink()
    (folder / "tls.crt").mkdir()


def _expired(folder: Path) -> None:
    authority().issue(["127.0.0.1"], -0.5).write(folder)


def _of_another_ca(folder: Path) -> None:
    (folder / "ca.crt").write_bytes(authority("foreign").certificate)


def _of_another_key(folder: Path) -> None:
    (folder / "tls.key").write_bytes(authority().issue(["127.0.0.1"], 1.0).key)


def _encrypted(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization as pem

    key = pem.load_pem_private_key((folder / "tls.key").read_bytes(), None)
    locked = pem.BestAvailableEncryption(b"a password")
    (folder / "tls.key").write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, locked))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda folder: (folder / "ca.crt").unlink(), "cannot read .*ca.crt: No such file.*roseinfer certificates"),
        (_folder_instead, "tls.crt is not a file"),
        (_mode("tls.key", 0o640), "other users may read .*tls.key; run: chmod 600"),
        (_mode("tls.key", 0o602), "other users may read"),
        (_text("ca.crt", ""), "certificates or the key are invalid"),
        (_text("tls.crt", "no certificate"), "certificates or the key are invalid"),
        (_of_another_key, "certificates or the key are invalid: KEY_VALUES_MISMATCH"),
        (_encrypted, "tls.key is encrypted"),
        (_expired, "tls.crt is not accepted: .*expired"),
        (_of_another_ca, "tls.crt is not accepted: .*not signed by our CA"),
    ],
)
def test_unusable_files_are_rejected_by_name(change: Callable[[Path], None], error: str, tmp_path: Path) -> None:
    write_certificate(tmp_path)
    change(tmp_path)
    with pytest.raises(ConfigError, match=f"^tls_dir: .*{error}"):
        TlsFolder(tmp_path)


def test_changed_files_are_used_and_invalid_ones_leave_the_previous(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = TlsFolder(write_certificate(tmp_path))
    first = tls.contexts()
    assert tls.contexts() is first
    write_certificate(tmp_path, days=20.0)
    second = tls.contexts()
    assert second is not first and second.expires_s < first.expires_s
    (tmp_path / "tls.crt").write_text("half a file")
    assert tls.contexts() is second and tls.contexts() is second
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and warnings[0].endswith("the previous certificate stays in use")
    (tmp_path / "tls.crt").unlink()
    assert tls.contexts() is second
    write_certificate(tmp_path, days=5.0)
    assert tls.contexts().expires_s < second.expires_s


def test_a_bundle_of_two_cas_accepts_hosts_of_both(tmp_path: Path) -> None:
    """Let a deployment change its CA without an interruption."""
    old, new = (TlsFolder(write_certificate(tmp_path / name, name)) for name in ("old", "new"))
    both = authority("old").certificate + authority("new").certificate
    for folder in (old, new):
        (folder.path / "ca.crt").write_bytes(both)
    client, server = sessions(server=new.contexts(), client=old.contexts())
    assert server.decrypt(client.encrypt(b"works")) == b"works"
