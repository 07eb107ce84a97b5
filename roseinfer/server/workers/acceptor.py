"""Accept connections and hand each to the worker that has the fewest."""

import asyncio
import itertools
import logging
import os
import socket
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from roseinfer.core.clock import MonotonicClock
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.server.hosting import remove_socket
from roseinfer.server.observe.throttle import ThrottledLog
from roseinfer.server.workers.counters import Count
from roseinfer.server.workers.handover import ConnectionSender

log = logging.getLogger(__name__)

# Connections accepted in one turn of the event loop.
MAX_BATCH_COUNT = 64
# Pauses after all workers were busy, and after a process had no descriptor left.
BUSY_PAUSE_S, FULL_PAUSE_S = 0.01, 1.0


class ConnectionTaker(Protocol):
    """Interface of `WorkerProcess`, which tests replace. `index`: its row of the shared counters."""

    index: int
    connections: ConnectionSender


@dataclass(slots=True, eq=False)
class _Entry:
    """Connections of a worker. `handed`: number ever; `turn`: order of the newest one; `late`: its heartbeat is late;
    `full`: it has no descriptor left; `loading`: it takes no requests yet."""

    worker: ConnectionTaker
    handed: int = 0
    turn: int = 0
    loading: bool = False
    late: bool = False
    full: bool = False

    @property
    def open(self) -> bool:
        return not self.late and not self.full


class Acceptor:
    """Acceptor of connections for all workers, which sees to it that their numbers differ by at most one.

    With a shared socket the kernel would give most connections of a burst to the process that wakes first. With
    SO_REUSEPORT it distributes them by a hash: of 8 connections to 4 workers, one often gets 4. The handover costs
    20 us a connection, in a process that has little else to do.

    A connection that its worker cannot take, or has not taken when it ends, goes to another one.
    """

    def __init__(self, listener: socket.socket, counters: SharedRows[Any]) -> None:
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

    def add(self, worker: ConnectionTaker, *, loading: bool = False) -> None:
        """Give connections to a worker; to one that is `loading` only while all others are loading, too."""
        entry = self._entries[worker.index] = _Entry(worker, loading=loading)
        self._loop.add_reader(worker.connections.fileno(), self._on_replies, entry)
        self._resume()

    def remove(self, worker: ConnectionTaker) -> None:
        """Remove a worker that has ended. Without any worker connections wait in the kernel."""
        entry = self._entry(worker)
        if entry is None:
            return
        del self._entries[worker.index]
        self._loop.remove_reader(worker.connections.fileno())
        timer = self._timers.pop(entry, None)
        if timer is not None:
            timer.cancel()
        self._held.extend(worker.connections.take_back())
        self._resume()

    def set_loaded(self, worker: ConnectionTaker) -> None:
        """Note that a worker takes requests."""
        entry = self._entry(worker)
        if entry is not None:
            entry.loading = False

    def set_late(self, worker: ConnectionTaker, late: bool) -> None:
        """Note whether a worker's heartbeat is late: then it gets no new connections."""
        entry = self._entry(worker)
        if entry is not None:
            entry.late = late
            self._resume()

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._listener)
        for entry in self._entries.values():
            self._loop.remove_reader(entry.worker.connections.fileno())
        for timer in (*self._timers.values(), *([self._pause] if self._pause is not None else [])):
            timer.cancel()
        for connection in self._held:
            connection.close()
        remove_socket(self._listener)
        self._listener.close()

    def _entry(self, worker: ConnectionTaker) -> _Entry | None:
        """Return the entry of a worker, None for one that was removed, whose index another may have."""
        entry = self._entries.get(worker.index)
        return None if entry is None or entry.worker is not worker else entry

    # --- accepting ----------------------------------------------------------------------------------------------
    def _resume(self) -> None:
        """Hand over held connections and accept new ones, if a worker takes them."""
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
                self._pause_accepting(BUSY_PAUSE_S)
                return
            self._held.popleft()
        self._loop.add_reader(self._listener, self._on_connections)

    def _pause_accepting(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        if self._pause is None:
            self._pause = self._loop.call_later(seconds, self._resume)

    def _on_connections(self) -> None:
        for _ in range(MAX_BATCH_COUNT):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # no descriptor is left
                self._throttled.error(f"cannot accept new connections for now: {os.strerror(error.errno or 0)}")
                self._pause_accepting(FULL_PAUSE_S)
                return
            if not self._give(connection):
                self._held.append(connection)
                self._pause_accepting(BUSY_PAUSE_S)
                return

    # --- handing over -------------------------------------------------------------------------------------------
    def _give(self, connection: socket.socket) -> bool:
        """Hand a connection to the worker with the fewest; of several, to the one that has waited longest."""
        takers = [entry for entry in self._entries.values() if entry.open]
        takers = [entry for entry in takers if not entry.loading] or takers
        for entry in sorted(takers, key=self._load):
            if entry.worker.connections.send(connection):
                entry.handed += 1
                entry.turn = next(self._turns)
                return True
        return False

    def _load(self, entry: _Entry) -> tuple[int, int]:
        return entry.handed - self._counters.get(entry.worker.index, Count.CLOSED), entry.turn

    def _on_replies(self, entry: _Entry) -> None:
        replies = entry.worker.connections.replies()
        if replies.closed:  # its process is ending; `remove` takes back the connections that it has not taken
            self._loop.remove_reader(entry.worker.connections.fileno())
        if replies.refused:
            self._on_refused(entry, replies.refused)
        elif self._held:
            self._resume()

    def _on_refused(self, entry: _Entry, refused: list[socket.socket]) -> None:
        entry.handed -= len(refused)
        self._held.extend(refused)
        if not entry.full:
            entry.full = True
            self._throttled.error(f"API worker {entry.worker.index} has no descriptor left for new connections")
            self._timers[entry] = self._loop.call_later(FULL_PAUSE_S, self._end_full_pause, entry)
        self._resume()

    def _end_full_pause(self, entry: _Entry) -> None:
        del self._timers[entry]
        entry.full = False
        self._resume()
