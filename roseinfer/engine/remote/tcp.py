"""Sockets between hosts: how they are set, and how long anything may take on them."""

import asyncio
import errno
import os
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from roseinfer.cluster.remote.address import HostPort
from roseinfer.core.errors import ConfigError
from roseinfer.engine.remote.handshake import Greeted, Purpose, introduce
from roseinfer.engine.remote.secret import Secret

CONNECT_S = 5.0
HANDSHAKE_S = 5.0
BACKLOG = 128
# Of their own: a name server that does not answer holds a thread for long, whoever has given up.
_RESOLVERS = ThreadPoolExecutor(4, "roseinfer-names")
# The kernel asks a silent other side so often, and lets go of one from which nothing has come for so long, in seconds.
PROBE_S, GONE_S = 5, 20


class AddressTakenError(ConfigError):
    """Somebody listens there already."""


def listen(bind: HostPort) -> socket.socket:
    """Raises `ConfigError` if that address cannot be used, `AddressTakenError` if it is used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"bind: cannot listen on {bind}: {reason(error)}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        error_type = AddressTakenError if error.errno == errno.EADDRINUSE else ConfigError
        raise error_type(f"bind: cannot listen on {bind}: {reason(error)}") from error
    return listener


def bound(listener: socket.socket) -> HostPort:
    return HostPort(*listener.getsockname()[:2])


def prepare(connection: socket.socket) -> None:
    """A connection that has been made: nothing waits to be sent in larger pieces, and a dead other side is noticed."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": GONE_S // PROBE_S}
    options["TCP_USER_TIMEOUT"] = 1000 * GONE_S
    for name, value in options.items():
        if hasattr(socket, name):  # macOS has not all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Connected(NamedTuple):
    """`round_trip_s`: about how long a packet takes there and another one back."""

    socket: socket.socket
    greeted: Greeted
    round_trip_s: float


async def connect(address: HostPort, secret: Secret, purpose: Purpose) -> Connected:
    """A connection that both sides accept. Raises `HandshakeError` if one does not, `OSError` if nothing is there."""
    try:
        async with asyncio.timeout(CONNECT_S):
            connection, round_trip_s = await _first(await _addresses(address))
    except TimeoutError:
        raise TimeoutError(f"no answer within {CONNECT_S:g} s") from None
    try:
        prepare(connection)
        async with asyncio.timeout(HANDSHAKE_S):
            return Connected(connection, await introduce(connection, secret, purpose), round_trip_s)
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no handshake within {HANDSHAKE_S:g} s") from None
        raise


async def _addresses(address: HostPort) -> list[tuple[Any, ...]]:
    """Of a host, as `socket.getaddrinfo` has them. Raises `OSError` if its name has none."""
    ask = partial(socket.getaddrinfo, address.host, address.port, type=socket.SOCK_STREAM)
    try:
        return ask(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name
        return await asyncio.get_running_loop().run_in_executor(_RESOLVERS, ask)


async def _first(found: Iterable[tuple[Any, ...]]) -> tuple[socket.socket, float]:
    """The first of a host's addresses that answers, and after how many seconds."""
    last: OSError | None = None
    loop = asyncio.get_running_loop()
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            began_s = loop.time()
            await loop.sock_connect(connection, address)
            return connection, loop.time() - began_s
        except OSError as error:
            connection.close()
            last = error
        except BaseException:
            connection.close()
            raise
    raise last or OSError("the name has no address")


def reason(error: OSError) -> str:
    """In words, without what only a program wants to know."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
