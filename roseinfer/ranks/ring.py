"""Messages from one process to some others through memory that they share, in order and each to all of them.

A reader that finds nothing looks again for a moment, then says so and sleeps on its pipe, and only then does the writer
need the system to wake it: to hand on a step costs a few microseconds, and nobody keeps a core busy while idle.
"""

import contextlib
import mmap
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Self

RING_BYTES = 8 << 20
# Each counter has a cache line to itself, or processes that write different ones would take it from each other.
_LINE = 64
_WORD = 8
# Should a processor show a flag so late that a wake-up is missed.
_DOZE_MS = 100
_PAUSE_S = 2e-4  # between looks at whether readers have made room


class RingClosedError(Exception):
    """The writer is gone: there will be no more messages."""


class _Memory:
    """`words[0]`: bytes ever written; of reader r, `read_at(r)` how many it has taken and `asleep_at(r)` whether it
    sleeps; then `data`, a circle of `size` bytes.
    """

    def __init__(self, descriptor: int, readers: int, size: int) -> None:
        head = _LINE * (1 + 2 * readers)
        self.size = size
        self._map = mmap.mmap(descriptor, head + size)
        self._view = memoryview(self._map)
        self.words = self._view[:head].cast("Q")
        self.data = self._view[head:]
        self._lock = threading.Lock()

    def fence(self) -> None:
        """What was written before is seen before what is read or written next, also by other processors: no load or
        store is moved past a lock that is taken and given back.
        """
        with self._lock:
            pass

    @staticmethod
    def read_at(reader: int) -> int:
        return (1 + 2 * reader) * (_LINE // _WORD)

    @staticmethod
    def asleep_at(reader: int) -> int:
        return (2 + 2 * reader) * (_LINE // _WORD)

    def close(self) -> None:
        for view in (self.words, self.data, self._view):
            view.release()
        self._map.close()


class RingWriter:
    """Makes the ring. A process that is to be reader r inherits the descriptors `memory` and `bells[r]`.

    `stuck` is called again and again while a reader takes so long that there is no room, and may raise.
    """

    def __init__(self, readers: int, stuck: Callable[[], None], size: int = RING_BYTES) -> None:
        """size: bytes that may be on their way at once; a message may be longer. Raises `OSError`."""
        self.readers = readers
        self.size = size
        self._stuck = stuck
        self._written = 0
        self._room = size
        self.torn = False
        with contextlib.ExitStack() as undo:
            self.memory = shared_descriptor(_LINE * (1 + 2 * readers) + size)
            undo.callback(os.close, self.memory)
            self._ring = _Memory(self.memory, readers, size)
            undo.callback(self._ring.close)
            self.bells, self._ropes = [], []
            for _ in range(readers):
                bell, rope = os.pipe()
                undo.callback(os.close, bell)
                undo.callback(os.close, rope)
                os.set_blocking(rope, False)
                self.bells.append(bell)
                self._ropes.append(rope)
            self._undo = undo.pop_all()

    def write(self, message: bytes | memoryview) -> None:
        """Copies the message; waits only if the ring is full.

        Whoever is interrupted in it (Ctrl+C) has written nothing, or `torn` is true: readers wait for the rest.
        """
        written, room = self._written, self._room
        self.torn = True
        try:
            self._put(len(message).to_bytes(_WORD, "little"))
            self._put(message)
        except BaseException:
            if self._ring.words[0] <= written:  # nobody has seen any of it
                self._written, self._room, self.torn = written, room, False
            raise
        self._publish()
        self.torn = False

    def _put(self, part: bytes | memoryview) -> None:
        ring, at, end = self._ring, 0, len(part)
        while at < end:
            if not self._room:
                self._make_room()
            place = self._written % ring.size
            count = min(end - at, self._room, ring.size - place)
            ring.data[place : place + count] = part[at : at + count]
            self._written += count
            self._room -= count
            at += count

    def _make_room(self) -> None:
        while not (room := self._free()):
            self._publish()
            time.sleep(_PAUSE_S)
            self._stuck()
        self._ring.fence()
        self._room = room

    def _free(self) -> int:
        ring = self._ring
        slowest = min(ring.words[ring.read_at(reader)] for reader in range(self.readers))
        return self.size - (self._written - slowest)

    def _publish(self) -> None:
        ring = self._ring
        ring.fence()
        ring.words[0] = self._written
        ring.fence()
        for reader, rope in enumerate(self._ropes):
            asleep = ring.asleep_at(reader)
            if ring.words[asleep]:
                ring.words[asleep] = 0
                with contextlib.suppress(BlockingIOError, BrokenPipeError):  # rung often enough; or nobody is there
                    os.write(rope, b"\0")

    def close(self) -> None:
        """Readers find what was written, then the end."""
        self._undo.close()


class RingReader:
    """Reader number `reader` of `readers`; `memory` and `bell` are the descriptors that it has inherited.

    spin_s: seconds that it looks for a message before it sleeps. idle: called while it sleeps, some times a second.
    """

    def __init__(
        self,
        memory: int,
        bell: int,
        reader: int,
        readers: int,
        size: int,
        spin_s: float,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._ring = _Memory(memory, readers, size)
        self._bell = bell
        self._spin_s = spin_s
        self._idle = idle
        self._read_at = self._ring.read_at(reader)
        self._asleep_at = self._ring.asleep_at(reader)
        self._read = 0
        self._pipe = select.poll()
        self._pipe.register(bell, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ring.close()

    def read(self) -> bytearray:
        """The next message, once it is there. Raises `RingClosedError` if the writer is gone."""
        return self._take(int.from_bytes(self._take(_WORD), "little"))

    def _take(self, count: int) -> bytearray:
        ring, taken, filled = self._ring, bytearray(count), 0
        while filled < count:
            there = ring.words[0] - self._read
            if not there:
                self._wait()
                continue
            ring.fence()
            place = self._read % ring.size
            step = min(there, count - filled, ring.size - place)
            taken[filled : filled + step] = ring.data[place : place + step]
            filled += step
            self._read += step
            ring.fence()
            ring.words[self._read_at] = self._read
        return taken

    def _wait(self) -> None:
        words = self._ring.words
        until = time.perf_counter() + self._spin_s
        while words[0] == self._read:
            if time.perf_counter() >= until:
                self._sleep()
                return

    def _sleep(self) -> None:
        ring, words = self._ring, self._ring.words
        while True:
            words[self._asleep_at] = 1
            ring.fence()
            if words[0] != self._read:
                words[self._asleep_at] = 0
                return
            if not self._pipe.poll(_DOZE_MS):
                self._idle()
            elif not os.read(self._bell, _LINE) and words[0] == self._read:
                raise RingClosedError


def shared_descriptor(size: int) -> int:
    """Of memory that has no name, and so is gone with the last process that has it. Raises `OSError`."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("roseinfer-ranks", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
