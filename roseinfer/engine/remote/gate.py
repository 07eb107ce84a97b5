"""The port of an engine: connections are accepted, and refused or let in after a handshake."""

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable

from roseinfer.cluster.remote.address import HostPort
from roseinfer.engine.remote import tcp
from roseinfer.engine.remote.handshake import Greeted, HandshakeError, receive
from roseinfer.engine.remote.secret import SecretSource

log = logging.getLogger("roseinfer.engine.remote")

# Connections that have not shown yet that they know the secret: the oldest of more is closed.
MAX_STRANGERS = 64
# Of one host and one cause one refusal is told in so many seconds, and of so many hosts at most.
TELL_AGAIN_S, MAX_TOLD = 3600.0, 256
# When the process has no descriptor left.
PAUSE_S = 0.2

Admit = Callable[[socket.socket, Greeted], bool]


class Gate:
    """`open`, then `accept`, then `close`. `admit` is given each connection that is good, and owns it; False: it has no
    room for it. `number()`: of the engine's process just now. `refused`: connections that were not let in, ever.
    """

    def __init__(self, secret: SecretSource, number: Callable[[], int], admit: Admit) -> None:
        self.refused = 0
        self._secret = secret
        self._number = number
        self._admit = admit
        self._closed = False
        self._refusals = Refusals()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._strangers: OrderedDict[asyncio.Task[None], None] = OrderedDict()

    def open(self, bind: HostPort) -> HostPort:
        """Listen: who connects waits. Raises `ConfigError` if that address cannot be used. Returns it, with the port
        that was found.
        """
        self._listener = tcp.listen(bind)
        return tcp.bound(self._listener)

    def accept(self) -> None:
        """Answer those who have come and will come."""
        assert self._listener is not None, "it is open"
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._strangers, *([] if self._accepting is None else [self._accepting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                self._refusals.tell(("", "accept"), f"no connection can be accepted: {tcp.reason(error)}")
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                self._strangers.popitem(last=False)[0].cancel()
            task = loop.create_task(self._greet(connection, str(address[0])))
            self._strangers[task] = None
            task.add_done_callback(lambda done: self._strangers.pop(done, None))
            # `sock_accept` does not wait while others do: everybody has a turn, and this one begins before it may end.
            await asyncio.sleep(0)

    async def _greet(self, connection: socket.socket, host: str) -> None:
        try:
            tcp.prepare(connection)
            async with asyncio.timeout(tcp.HANDSHAKE_S):
                greeted = await receive(connection, self._secret.now(), self._number())
        except (HandshakeError, OSError) as error:  # a TimeoutError is one
            self._refuse(connection, host, error)
        except asyncio.CancelledError:
            self._refuse(connection, host, HandshakeError("it was slower with its handshake than many others"))
            raise
        else:
            if not self._admit(connection, greeted):
                self._refuse(connection, host, HandshakeError("the engine takes no connections just now"))

    def _refuse(self, connection: socket.socket, host: str, error: Exception) -> None:
        connection.close()
        if self._closed:
            return
        self.refused += 1
        cause = error.verdict if isinstance(error, HandshakeError) else type(error)
        self._refusals.tell((host, str(cause)), f"a connection from {host} was refused: {_why(error)}")


def _why(error: Exception) -> str:
    if isinstance(error, HandshakeError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"it has not finished its handshake within {tcp.HANDSHAKE_S:g} s"
    return "it hung up during the handshake"


class Refusals:
    """Tells of each once, however often somebody tries, and stays small, however many do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: OrderedDict[tuple[str, str], float] = OrderedDict()

    def tell(self, what: tuple[str, str], message: str) -> None:
        """`what`: by which it is known again."""
        now_s = self._clock()
        while self._told and next(iter(self._told.values())) <= now_s - TELL_AGAIN_S:
            self._told.popitem(last=False)
        if what in self._told or len(self._told) >= MAX_TOLD:
            return
        self._told[what] = now_s
        log.warning("%s", message)
