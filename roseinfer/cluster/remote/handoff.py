"""Pass a connection to the process of its engine, before TLS begins.

One port serves the engine and its status, so that an engine that loads, hangs or has died still has a status. The
engine's process completes TLS itself. So no other process reads its traffic, and a token takes no additional hop.
"""

import asyncio
import contextlib
import json
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from roseinfer.cluster.remote.handshake import HandshakeError, Purpose, Refusal, accept
from roseinfer.cluster.remote.listener import Handshakes
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.engine.process_transport import PeerBoot
from roseinfer.processes.frames import Frames

MAX_REPORT_BYTES = 2**16


class Handoff:
    """The server's end: `give` connections to the engine's process. `inside`: the process's end, to be inherited."""

    def __init__(self, refuse: Callable[[str, HandshakeError], None]) -> None:
        """`refuse`: called for each connection that the process rejects, with the host and the reason."""
        self._outside, self.inside = socket.socketpair()
        self._outside.setblocking(False)
        self._refuse = refuse
        self._unread = b""
        asyncio.get_running_loop().add_reader(self._outside, self._read_refusals)

    def give(self, connection: socket.socket) -> bool:
        """Return False if the process has taken so few recently that there is no room, or is gone."""
        try:
            socket.send_fds(self._outside, [b"\0"], [connection.fileno()])
        except OSError:
            return False
        connection.close()
        return True

    def _read_refusals(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._outside.recv(MAX_REPORT_BYTES)
        if not data:
            asyncio.get_running_loop().remove_reader(self._outside)
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            host, refusal, message = json.loads(line)
            self._refuse(host, HandshakeError(message, Refusal(refusal)))

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            asyncio.get_running_loop().remove_reader(self._outside)
        self._outside.close()
        self.inside.close()


class PeerConnections:
    """The process's end, see `PeerSource`: complete handshakes in a thread, so that no step waits for one."""

    def __init__(self, inside: socket.socket, tls: TlsFolder, number: int) -> None:
        """`number`: of this process, see `EngineStatus`."""
        self._inside = inside
        self._inside.setblocking(False)
        self._tls = tls
        self._number = number
        self._ready: queue.SimpleQueue[tuple[socket.socket, Frames]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="peer-handshakes", daemon=True)
        self._thread.start()

    @classmethod
    def from_boot(cls, boot: PeerBoot) -> "PeerConnections":
        """Raise `ConfigError` if the TLS files cannot be used."""
        return cls(socket.socket(fileno=boot.handoff), TlsFolder(Path(boot.tls_dir)), boot.number)

    # --- the engine's thread ------------------------------------------------------------------------------------
    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection is ready."""
        return self._woken.fileno()

    def take(self) -> list[tuple[socket.socket, Frames]]:
        """Return the connections that are ready."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        ready = []
        with contextlib.suppress(queue.Empty):
            while True:
                ready.append(self._ready.get_nowait())
        return ready

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        for connection, _ in self.take():
            connection.close()
        for end in (self._inside, self._wake, self._woken):
            end.close()

    # --- the thread of handshakes -------------------------------------------------------------------------------
    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._accept_all())

    async def _accept_all(self) -> None:
        """Accept what is passed on, until `close` or until the other end is closed."""
        loop, handshakes = asyncio.get_running_loop(), Handshakes(self._report)

        def readable() -> None:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._inside, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                loop.remove_reader(self._inside)
            # Without a free descriptor in this process, the connection is lost.
            for connection in (socket.socket(fileno=descriptor) for descriptor in descriptors):
                handshakes.begin(connection, _host_of(connection), self._greet(connection))

        loop.add_reader(self._inside, readable)
        await self._stop.wait()
        loop.remove_reader(self._inside)
        await handshakes.close()

    async def _greet(self, connection: socket.socket) -> None:
        peer = await accept(connection, self._tls.contexts(), Purpose.ENGINE, self._number)
        self._ready.put((connection, peer.frames))
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._wake.send(b"\0")

    def _report(self, host: str, error: HandshakeError) -> None:
        line = json.dumps([host, error.refusal, str(error)]).encode() + b"\n"
        with contextlib.suppress(OSError):  # the server does not read, or has ended
            self._inside.send(line)


def _host_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except (OSError, IndexError):  # it is gone, or not an internet connection
        return "unknown"
