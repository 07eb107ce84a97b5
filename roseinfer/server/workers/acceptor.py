"""Accepts connections and hands each to the worker that has the fewest."""

import asyncio
import itertools
import logging
import os
import socket
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from roseinfer.core.clock import MonotonicClock
from roseinfer.server.observe.throttle import ThrottledLog
from roseinfer.server.workers.counters import Count, SharedCounters
from roseinfer.server.workers.handover import ConnectionSender

log = logging.getLogger(__name__)

# Connections accepted before others get a turn.
BATCH = 64
# After workers were too busy to take more, and after a process, this or a worker's, could hold no more.
BUSY_PAUSE_S, FULL_PAUSE_S = 0.01, 1.0


class Host(Protocol):
    """Takes connections: `index` is its row of the shared counters."""

    index: int
    connections: ConnectionSender


@dataclass(slots=True, eq=False)
class _Entry:
    """A host, and what it got. `handed`: connections, ever; `turn`: when it got the newest one; `quiet`: it does not
    move; `full`: it has no descriptor left; `loading`: it cannot take requests yet."""

    host: Host
    handed: int = 0
    turn: int = 0
    loading: bool = False
    quiet: bool = False
    full: bool = False

    @property
    def open(self) -> bool:
        return not self.quiet and not self.full


class Acceptor:
    """The kernel would give most connections of a burst to whichever process wakes first, or, with a socket of its own
    for each, deal them out by a hash: of 8 connections to 4 workers one often gets 4. Here all get as many, give or
    take one, for 20 us a connection in a process that has nothing else to do.

    A connection that its worker has not taken when it ends, or cannot take, goes to another one.
    """

    def __init__(self, listener: socket.socket, counters: SharedCounters) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._entries: dict[int, _Entry] = {}
        self._turns = itertools.count()
        self._held: deque[socket.socket] = deque()
        self._timers: dict[_Entry, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._throttled = ThrottledLog(log, MonotonicClock())
        self._closed = False

    def add(self, host: Host, *, loading: bool = False) -> None:
        """From now on it gets connections; one that is `loading` only as long as all others are too."""
        entry = self._entries[host.index] = _Entry(host, loading=loading)
        self._loop.add_reader(host.connections.fileno(), self._on_answers, entry)
        self._go_on()

    def remove(self, host: Host) -> None:
        """It is gone; without anybody who takes them, connections wait in the kernel."""
        entry = self._entries.get(host.index)
        if entry is None or entry.host is not host:
            return
        del self._entries[host.index]
        self._loop.remove_reader(host.connections.fileno())
        timer = self._timers.pop(entry, None)
        if timer is not None:
            timer.cancel()
        self._held.extend(host.connections.take_back())
        self._go_on()

    def loaded(self, host: Host) -> None:
        entry = self._entries.get(host.index)
        if entry is not None and entry.host is host:
            entry.loading = False

    def set_quiet(self, host: Host, quiet: bool) -> None:
        """A quiet host gets no connections, but keeps those that it has."""
        entry = self._entries.get(host.index)
        if entry is not None and entry.host is host:
            entry.quiet = quiet
            self._go_on()

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._listener)
        for entry in self._entries.values():
            self._loop.remove_reader(entry.host.connections.fileno())
        for timer in (*self._timers.values(), *([self._pause] if self._pause is not None else [])):
            timer.cancel()
        for connection in self._held:
            connection.close()
        self._listener.close()

    # --- accepting ----------------------------------------------------------------------------------------------
    def _go_on(self) -> None:
        """Take up work again, as far as there is somebody to give it to."""
        if self._closed:
            return
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if not any(entry.open for entry in self._entries.values()):
            self._loop.remove_reader(self._listener)
            return
        while self._held:
            if not self._give(self._held[0]):
                self._rest(BUSY_PAUSE_S)
                return
            self._held.popleft()
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
                self._throttled.error(f"new connections have to wait: {os.strerror(error.errno or 0)}")
                self._rest(FULL_PAUSE_S)
                return
            if not self._give(connection):
                self._held.append(connection)
                self._rest(BUSY_PAUSE_S)
                return

    # --- handing over -------------------------------------------------------------------------------------------
    def _give(self, connection: socket.socket) -> bool:
        """To the worker with the fewest connections, of several to the one that has waited longest."""
        takers = [entry for entry in self._entries.values() if entry.open]
        takers = [entry for entry in takers if not entry.loading] or takers
        for entry in sorted(takers, key=self._load):
            if entry.host.connections.send(connection):
                entry.handed += 1
                entry.turn = next(self._turns)
                return True
        return False

    def _load(self, entry: _Entry) -> tuple[int, int]:
        return entry.handed - self._counters.get(entry.host.index, Count.CLOSED), entry.turn

    def _on_answers(self, entry: _Entry) -> None:
        answers = entry.host.connections.answers()
        if answers.closed:  # its process is ending; `remove` takes back what it has not taken
            self._loop.remove_reader(entry.host.connections.fileno())
        if answers.refused:
            self._on_refused(entry, answers.refused)
        elif self._held:
            self._go_on()

    def _on_refused(self, entry: _Entry, refused: list[socket.socket]) -> None:
        entry.handed -= len(refused)
        self._held.extend(refused)
        if not entry.full:
            entry.full = True
            self._throttled.error(f"API worker {entry.host.index} has no descriptor left for new connections")
            self._timers[entry] = self._loop.call_later(FULL_PAUSE_S, self._on_rested, entry)
        self._go_on()

    def _on_rested(self, entry: _Entry) -> None:
        del self._timers[entry]
        entry.full = False
        self._go_on()
