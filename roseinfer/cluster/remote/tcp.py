"""Connections between hosts: socket options, timeouts, and how a client connects."""

import asyncio
import errno
import os
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from roseinfer.cluster.remote.address import HostPort
from roseinfer.core.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 5.0
MAX_BACKLOG_COUNT = 128
# Threads of their own: a name server that does not answer holds a thread for long.
_RESOLVERS = ThreadPoolExecutor(4, "roseinfer-names")
# The kernel probes a silent peer this often, and closes the connection after this time.
PROBE_INTERVAL_S, PROBE_TIMEOUT_S = 5, 20


class AddressTakenError(ConfigError):
    """Another process listens on the address."""


def listen(bind: HostPort) -> socket.socket:
    """Raise `ConfigError` if the address cannot be used, `AddressTakenError` if it is in use."""
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
        listener.listen(MAX_BACKLOG_COUNT)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        error_type = AddressTakenError if error.errno == errno.EADDRINUSE else ConfigError
        raise error_type(f"bind: cannot listen on {bind}: {reason(error)}") from error
    return listener


def bound(listener: socket.socket) -> HostPort:
    return HostPort(*listener.getsockname()[:2])


def configure(connection: socket.socket) -> None:
    """Send small pieces at once, and detect a peer that is gone."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = PROBE_TIMEOUT_S // PROBE_INTERVAL_S
    options = {"TCP_KEEPIDLE": PROBE_INTERVAL_S, "TCP_KEEPINTVL": PROBE_INTERVAL_S, "TCP_KEEPCNT": probes}
    options["TCP_USER_TIMEOUT"] = 1000 * PROBE_TIMEOUT_S
    for name, value in options.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def connect(address: HostPort) -> tuple[socket.socket, float]:
    """Connect, and return about how many seconds a packet takes there and back. Raise `OSError` without an answer."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            connection, round_trip_s = await _first(await _addresses(address))
    except TimeoutError:
        raise TimeoutError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None
    configure(connection)
    return connection, round_trip_s


async def _addresses(address: HostPort) -> list[tuple[Any, ...]]:
    """Return a host's addresses, as `socket.getaddrinfo` does. Raise `OSError` if its name has none."""
    ask = partial(socket.getaddrinfo, address.host, address.port, type=socket.SOCK_STREAM)
    try:
        return ask(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name
        return await asyncio.get_running_loop().run_in_executor(_RESOLVERS, ask)


async def _first(found: Iterable[tuple[Any, ...]]) -> tuple[socket.socket, float]:
    """Connect to the first of a host's addresses that answers."""
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
    """Return the error in words, without numbers."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
