"""Accepts connections and hands each to the worker that has the fewest."""

import asyncio
import itertools
import logging
import socket
from collections import deque
from typing import Protocol

from roseinfer.server.fleet.control import hand_over
from roseinfer.server.fleet.counters import Count, SharedCounters

log = logging.getLogger(__name__)

# Connections accepted before others get a turn.
BATCH = 64
# After workers were too busy to take more, and after this process could hold no more.
BUSY_PAUSE_S, FULL_PAUSE_S = 0.01, 1.0


class Host(Protocol):
    """Takes connections: `index` is its row of the shared counters."""

    index: int
    connections: socket.socket


class Acceptor:
    """The kernel would give most connections of a burst to whichever process wakes first, or, with a socket of its own
    for each, deal them out by a hash: of 8 connections to 4 workers one often gets 4. Here all get as many, give or
    take one, for 20 us a connection in a process that has nothing else to do.
    """

    def __init__(self, listener: socket.socket, counters: SharedCounters) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._hosts: list[Host] = []
        self._handed: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._turns = itertools.count()
        self._held: deque[socket.socket] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self, host: Host) -> None:
        """From now on it gets connections."""
        self._handed[host.index] = self._last[host.index] = 0
        self._hosts.append(host)
        self._go_on()

    def remove(self, host: Host) -> None:
        """It gets no more; without anybody who takes them, connections wait in the kernel."""
        if host in self._hosts:
            self._hosts.remove(host)
        if not self._hosts and not self._closed:
            self._loop.remove_reader(self._listener)

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for connection in self._held:
            connection.close()
        self._listener.close()

    def _go_on(self) -> None:
        self._pause = None
        while self._held:
            if not self._give(self._held[0]):
                self._rest(BUSY_PAUSE_S)
                return
            self._held.popleft().close()
        if self._hosts and not self._closed:
            self._loop.add_reader(self._listener, self._on_connections)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        if self._pause is None:
            self._pause = self._loop.call_later(seconds, self._go_on)

    def _on_connections(self) -> None:
        for _ in range(BATCH):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # no descriptor is left
                log.error("no more connections can be taken: %s", error.strerror)
                self._rest(FULL_PAUSE_S)
                return
            if not self._give(connection):
                self._held.append(connection)
                self._rest(BUSY_PAUSE_S)
                return
            connection.close()

    def _give(self, connection: socket.socket) -> bool:
        """To the worker with the fewest connections, of several to the one that has waited longest."""
        for host in sorted(self._hosts, key=self._load):
            if hand_over(host.connections, connection):
                self._handed[host.index] += 1
                self._last[host.index] = next(self._turns)
                return True
        return False

    def _load(self, host: Host) -> tuple[int, int]:
        return self._handed[host.index] - self._counters.get(host.index, Count.CLOSED), self._last[host.index]
