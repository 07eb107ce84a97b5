"""The port of an engine: accept connections, and pass them on or complete their handshake."""

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from roseinfer.cluster.remote import tcp
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.handshake import HandshakeError, Purpose, Refusal, VerifiedPeer, accept, read_purpose
from roseinfer.cluster.remote.tls import TlsFolder

log = logging.getLogger(__name__)

# Connections whose handshake is not complete: the oldest of more is closed.
MAX_HANDSHAKES_COUNT = 64
# A refusal of one host for one reason is logged once in this time, and of this many hosts at most.
REPEAT_LOG_S, MAX_LOGGED_COUNT = 3600.0, 256
# Pause when the process has no file descriptor left.
ACCEPT_PAUSE_S = 0.2


class Handshakes:
    """Handshakes in progress: bounded in number and in time. `refuse` is called for each that fails."""

    def __init__(self, refuse: Callable[[str, HandshakeError], None]) -> None:
        """`refuse`: called with the host of a closed connection, and why it was closed."""
        self._refuse = refuse
        self._closed = False
        self._tasks: OrderedDict[asyncio.Task[None], None] = OrderedDict()

    @property
    def count(self) -> int:
        return len(self._tasks)

    def begin(self, connection: socket.socket, host: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which owns the connection once it returns."""
        if len(self._tasks) >= MAX_HANDSHAKES_COUNT:
            self._tasks.popitem(last=False)[0].cancel()
        task = asyncio.get_running_loop().create_task(self._bounded(connection, host, work))
        self._tasks[task] = None

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.pop(done, None)
            work.close()  # if it never began
            if done.cancelled():
                connection.close()

        task.add_done_callback(ended)

    async def _bounded(self, connection: socket.socket, host: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            tcp.configure(connection)
            async with asyncio.timeout(tcp.HANDSHAKE_TIMEOUT_S):
                await work
        except (HandshakeError, OSError) as error:  # a TimeoutError is one
            self._reject(connection, host, _as_refusal(error))
        except asyncio.CancelledError:
            slow = HandshakeError("its handshake was slower than those of many others", Refusal.BUSY)
            self._reject(connection, host, slow)
            raise

    def _reject(self, connection: socket.socket, host: str, error: HandshakeError) -> None:
        connection.close()
        if not self._closed:
            self._refuse(host, error)

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _as_refusal(error: Exception) -> HandshakeError:
    if isinstance(error, HandshakeError):
        return error
    if isinstance(error, TimeoutError):
        limit_s = tcp.HANDSHAKE_TIMEOUT_S
        return HandshakeError(f"it did not finish its handshake within {limit_s:g} s", Refusal.TIMEOUT)
    return HandshakeError("it closed the connection during the handshake", Refusal.CLOSED)


class Listener:
    """Accept connections on an address: `open`, then `accept`, then `close`.

    A connection to the engine goes to `pass_on`, before TLS. Others go to `admit` after their handshake. Both own the
    connection, or return False if they cannot take it. `refused`: number of connections that were rejected so far.
    """

    def __init__(
        self,
        tls: TlsFolder,
        number: Callable[[], int],
        *,
        pass_on: Callable[[socket.socket], bool],
        admit: Callable[[socket.socket, VerifiedPeer], bool],
    ) -> None:
        """`number()`: number of the current engine process."""
        self.refused = 0
        self._tls = tls
        self._number = number
        self._pass_on = pass_on
        self._admit = admit
        self._handshakes = Handshakes(self.refuse)
        self._log = RefusalLog()
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    @property
    def handshakes(self) -> int:
        """Return how many connections have yet to show who they are."""
        return self._handshakes.count

    def open(self, bind: HostPort) -> HostPort:
        """Listen; clients wait until `accept`. Return the address, with the port that was chosen.

        Raise `ConfigError` if the address cannot be used.
        """
        self._socket = tcp.listen(bind)
        return tcp.bound(self._socket)

    def accept(self) -> None:
        assert self._socket is not None, "it is open"
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._socket))

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        await self._handshakes.close()
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                self._log.warn(("", "accept"), f"cannot accept connections: {tcp.reason(error)}")
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._handshakes.begin(connection, str(address[0]), self._greet(connection))
            # `sock_accept` does not yield while clients wait: let other tasks run, and let this one start.
            await asyncio.sleep(0)

    async def _greet(self, connection: socket.socket) -> None:
        purpose = await read_purpose(connection)
        if purpose is Purpose.ENGINE:
            taken = self._pass_on(connection)
        else:
            peer = await accept(connection, self._tls.contexts(), purpose, self._number())
            taken = self._admit(connection, peer)
        if not taken:
            raise HandshakeError("the engine accepts no connections at the moment", Refusal.BUSY)

    def refuse(self, host: str, error: HandshakeError) -> None:
        """Count and log a connection that was rejected here or by the engine's process."""
        self.refused += 1
        self._log.warn((host, error.refusal.name), f"a connection from {host} was rejected: {error}")


class RefusalLog:
    """Log each kind of refusal once an hour, however often a host tries and however many hosts do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: OrderedDict[tuple[str, str], float] = OrderedDict()

    def warn(self, kind: tuple[str, str], message: str) -> None:
        now_s = self._clock()
        while self._logged and next(iter(self._logged.values())) <= now_s - REPEAT_LOG_S:
            self._logged.popitem(last=False)
        if kind in self._logged or len(self._logged) >= MAX_LOGGED_COUNT:
            return
        self._logged[kind] = now_s
        log.warning("%s", message)
