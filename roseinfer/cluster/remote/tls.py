"""TLS 1.3 between hosts, by Python's `ssl`. Both sides present a certificate of the deployment's certificate authority.

TLS runs over buffers in memory, so that any loop can read and write the socket: asyncio's, or the engine's own.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from roseinfer.core.errors import ConfigError
from roseinfer.processes.frames import FrameError, FrameReader, frame

log = logging.getLogger(__name__)

# The names that Kubernetes and cert-manager give to these files.
CA_FILE, CERTIFICATE_FILE, KEY_FILE = FILES = ("ca.crt", "tls.crt", "tls.key")
# A prompt of two million tokens fits into one message.
MAX_FRAME_BYTES = 2**26
CHUNK_BYTES = 2**16
MAX_RECORD_BYTES = 2**14
MAKE_HINT = "make certificates with: roseinfer certificates DIR --hosts HOST,..."


class TlsContexts(NamedTuple):
    """Settings of connections that we accept (`server`) and make (`client`).

    `expires_s`: end of our own certificate, in seconds since 1970.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    expires_s: float


class TlsFolder:
    """The CA's certificate, our own certificate and its key, in one folder.

    `contexts` reads the files again when they have changed. So certificates are renewed without a restart: a new
    connection uses the new files, and existing connections continue. If the new files are invalid, the log says so
    once, and the previous ones stay in use.
    """

    def __init__(self, path: Path) -> None:
        """Raise `ConfigError` if a file is missing, readable by others, invalid or expired."""
        self.path = path.absolute()
        self._state = self._file_state()
        self._contexts = load_contexts(self.path)

    def contexts(self) -> TlsContexts:
        state = self._file_state()
        if state != self._state:
            self._state = state
            try:
                self._contexts = load_contexts(self.path)
            except ConfigError as error:
                log.warning("%s; the previous certificate stays in use", error)
            else:
                log.info("new connections use the changed certificates in %s", self.path)
        return self._contexts

    def _file_state(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(_state_of(self.path / name) for name in FILES)


def _state_of(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size


# --- files ----------------------------------------------------------------------------------------------------------
def load_contexts(folder: Path) -> TlsContexts:
    """Raise `ConfigError` if a file is missing, readable by others, invalid or expired."""
    for name in FILES:
        _check_file(folder / name, private=name == KEY_FILE)
    try:
        server, client, unnamed = (_context(folder, server_side=side) for side in (True, False, False))
    except ssl.SSLError as error:
        raise ConfigError(f"tls_dir: {folder}: the certificates or the key are invalid: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"tls_dir: cannot read {folder}: {error.strerror}") from error
    unnamed.check_hostname = False  # our own certificate may name a host, or none
    return TlsContexts(server, client, _check_own_certificate(folder, server, unnamed))


def _check_file(path: Path, *, private: bool) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"tls_dir: cannot read {path}: {error.strerror} ({MAKE_HINT})") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"tls_dir: {path} is not a file")
    if not private:
        return
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"tls_dir: {path} belongs to another user")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and not _is_mounted(status):
        raise ConfigError(f"tls_dir: other users may read {path}; run: chmod 600 {path}")


def _is_mounted(status: os.stat_result) -> bool:
    """True if the file is root's and only our group may read it, as Kubernetes mounts secrets for other users."""
    others = status.st_mode & (stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO)
    return status.st_uid == 0 and os.getuid() != 0 and not others and status.st_gid in (os.getgid(), *os.getgroups())


def _context(folder: Path, *, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / CA_FILE)
    # Without a callback, an encrypted key would ask for its password on the terminal.
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password=lambda: _refuse_encrypted(folder))
    if server_side:
        context.num_tickets = 0  # a connection lasts as long as its two processes
    return context


def _refuse_encrypted(folder: Path) -> str:
    raise ConfigError(f"tls_dir: {folder / KEY_FILE} is encrypted; store it without a password")


def _check_own_certificate(folder: Path, server: ssl.SSLContext, client: ssl.SSLContext) -> float:
    """Connect to ourselves in memory, and return when our certificate expires, in seconds since 1970.

    Raise `ConfigError` if our own CA does not accept it, as peers would not either.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for end in 2 * ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLError as error:
        raise ConfigError(f"tls_dir: {folder}: {CERTIFICATE_FILE} is not accepted: {explain(error)}") from error
    certificate = ends[0].getpeercert()
    assert certificate is not None, "it was verified"
    return ssl.cert_time_to_seconds(str(certificate["notAfter"]))


# --- connections ----------------------------------------------------------------------------------------------------
class TlsSession:
    """TLS of one connection over buffers in memory. `server_name`: the name that the certificate of the server must
    have; None if we are the server.
    """

    def __init__(self, contexts: TlsContexts, server_name: str | None = None) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = contexts.server if server_name is None else contexts.client
        self._tls = context.wrap_bio(
            self._received, self._to_send, server_side=server_name is None, server_hostname=server_name
        )

    async def handshake(self, connection: socket.socket) -> None:
        """Raise `ssl.SSLError` if a side rejects the other, another `OSError` if the connection is lost."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush(connection)
                await self._receive(connection)
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # the peer may disconnect before it gets the reason
                    await self._flush(connection)
                raise
            else:
                await self._flush(connection)
                return

    async def read_exactly(self, connection: socket.socket, size: int) -> bytes:
        """Read this many bytes of what the peer sends; whatever follows them stays for `decrypt`."""
        data = b""
        while len(data) < size:
            try:
                data += self._tls.read(size - len(data))
            except ssl.SSLWantReadError:
                await self._receive(connection)
        return data

    async def write(self, connection: socket.socket, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, self.encrypt(data))

    async def _flush(self, connection: socket.socket) -> None:
        if data := self._to_send.read():
            await asyncio.get_running_loop().sock_sendall(connection, data)

    async def _receive(self, connection: socket.socket) -> None:
        data = await asyncio.get_running_loop().sock_recv(connection, CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        self._received.write(data)

    def encrypt(self, data: bytes) -> bytes:
        """Return what to send for `data`."""
        written = self._tls.write(data)
        while written < len(data):  # a record holds 16 KiB
            written += self._tls.write(memoryview(data)[written:])
        return self._to_send.read()

    def decrypt(self, data: bytes) -> bytes:
        """Return what the received `data` contains, as far as it is complete. Raise `FrameError` if it is invalid."""
        self._received.write(data)
        parts = []
        try:
            # Reading on until nothing is left would cost an exception for each call.
            while self._received.pending or self._tls.pending():
                part = self._tls.read(MAX_RECORD_BYTES)
                if not part:
                    break  # the peer ended TLS; the end of the connection follows
                parts.append(part)
        except ssl.SSLWantReadError:
            pass  # the rest of a record is still to come
        except ssl.SSLError as error:
            raise FrameError(f"invalid TLS data: {error.reason}") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)


class TlsFrames:
    """Messages over a `TlsSession`, see `Frames`."""

    def __init__(self, session: TlsSession, limit: int = MAX_FRAME_BYTES) -> None:
        self._session = session
        self._limit = limit
        self._reader = FrameReader(limit)

    def feed(self, data: bytes) -> list[bytes]:
        return self._reader.feed(self._session.decrypt(data))

    def wrap(self, data: bytes) -> bytes:
        if len(data) > self._limit:
            raise OverflowError(f"a message of {len(data)} bytes exceeds the limit of {self._limit}")
        return self._session.encrypt(frame(data))


# --- errors ---------------------------------------------------------------------------------------------------------
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it presented no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not accept our certificate: another CA signed it",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it does not accept our certificate, which has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not accept our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not accept our certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not support TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "it does not support TLS 1.3",
}
_CA_ERRORS = (18, 19, 20, 21)  # OpenSSL's X509_V_ERR codes for "no certificate of a known CA in the chain"


def explain(error: ssl.SSLError) -> str:
    """Say why a handshake failed. Hosts that do not use TLS at all are the most frequent case."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _CA_ERRORS:
            return f"its certificate is not signed by our CA ({error.verify_message})"
        return f"its certificate is invalid: {error.verify_message.rstrip('.')}"
    return _REASONS.get(error.reason or "", f"it does not speak TLS ({error.reason})")
