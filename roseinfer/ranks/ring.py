"""Ring buffer in shared memory: messages from one process to several others, in order, each to all of them.

A reader without a message polls for a moment, then sets a flag and sleeps on its pipe. The writer wakes only sleeping
readers by a system call. So sending a step takes a few microseconds, and an idle reader uses no processor time.
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
# Each counter has a cache line of its own, as processes that write different counters would slow each other down.
_LINE_BYTES = 64
_WORD_BYTES = 8
# A sleeping reader checks this often, in case its flag became visible too late for the writer to wake it.
_CHECK_MS = 100
_ROOM_POLL_S = 2e-4


class RingClosedError(Exception):
    """The writer has ended: there will be no more messages."""


class _Memory:
    """Layout of the shared memory.

    `words[0]` counts the bytes ever written, `words[read_at(r)]` the bytes that reader r has taken, and
    `words[asleep_at(r)]` is 1 while it sleeps. `data` is the ring of `size` bytes.
    """

    def __init__(self, descriptor: int, readers: int, size: int) -> None:
        head = _LINE_BYTES * (1 + 2 * readers)
        self.size = size
        self._map = mmap.mmap(descriptor, head + size)
        self._view = memoryview(self._map)
        self.words = self._view[:head].cast("Q")
        self.data = self._view[head:]
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Order memory accesses: other processors see earlier writes before later reads and writes of this one.

        Taking and releasing a lock is such a barrier.
        """
        with self._lock:
            pass

    @staticmethod
    def read_at(reader: int) -> int:
        return (1 + 2 * reader) * (_LINE_BYTES // _WORD_BYTES)

    @staticmethod
    def asleep_at(reader: int) -> int:
        return (2 + 2 * reader) * (_LINE_BYTES // _WORD_BYTES)

    def close(self) -> None:
        for view in (self.words, self.data, self._view):
            view.release()
        self._map.close()


class RingWriter:
    """Owner of the ring. The process of reader r inherits the descriptors `memory` and `wake_pipes[r]`.

    `on_full` is called repeatedly while a slow reader leaves no room, and may raise.
    """

    def __init__(self, readers: int, on_full: Callable[[], None], size: int = RING_BYTES) -> None:
        """size: bytes in flight at most; a message may be longer. Raises `OSError`."""
        self.readers = readers
        self.size = size
        self._on_full = on_full
        self._written = 0
        self._room = size
        self.torn = False
        with contextlib.ExitStack() as undo:
            self.memory = shared_descriptor(_LINE_BYTES * (1 + 2 * readers) + size)
            undo.callback(os.close, self.memory)
            self._ring = _Memory(self.memory, readers, size)
            undo.callback(self._ring.close)
            self.wake_pipes, self._wake_ends = [], []
            for _ in range(readers):
                wake_pipe, wake_end = os.pipe()
                undo.callback(os.close, wake_pipe)
                undo.callback(os.close, wake_end)
                os.set_blocking(wake_end, False)
                self.wake_pipes.append(wake_pipe)
                self._wake_ends.append(wake_end)
            self._undo = undo.pop_all()

    def write(self, message: bytes | memoryview) -> None:
        """Copy the message to the ring. Waits only if the ring is full.

        If this is interrupted (Ctrl+C), either nothing was written, or `torn` is set: readers wait for the rest.
        """
        written, room = self._written, self._room
        self.torn = True
        try:
            self._put(len(message).to_bytes(_WORD_BYTES, "little"))
            self._put(message)
        except BaseException:
            if self._ring.words[0] <= written:  # no reader has seen any of it
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
            time.sleep(_ROOM_POLL_S)
            self._on_full()
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
        for reader, wake_end in enumerate(self._wake_ends):
            asleep = ring.asleep_at(reader)
            if ring.words[asleep]:
                ring.words[asleep] = 0
                with contextlib.suppress(BlockingIOError, BrokenPipeError):  # woken already; or the reader has ended
                    os.write(wake_end, b"\0")

    def close(self) -> None:
        """Close the ring. Readers get the written messages, then `RingClosedError`."""
        self._undo.close()


class RingReader:
    """Reader number `reader` of `readers`, with the descriptors `memory` and `wake_pipe` that it has inherited.

    spin_s: how long it polls for a message before it sleeps. idle: called a few times a second while it sleeps.
    """

    def __init__(
        self,
        memory: int,
        wake_pipe: int,
        reader: int,
        readers: int,
        size: int,
        spin_s: float,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._ring = _Memory(memory, readers, size)
        self._wake_pipe = wake_pipe
        self._spin_s = spin_s
        self._idle = idle
        self._read_at = self._ring.read_at(reader)
        self._asleep_at = self._ring.asleep_at(reader)
        self._read = 0
        self._pipe = select.poll()
        self._pipe.register(wake_pipe, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ring.close()

    def read(self) -> bytearray:
        """Wait for the next message and return it. Raises `RingClosedError` if the writer has ended."""
        return self._take(int.from_bytes(self._take(_WORD_BYTES), "little"))

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
            if not self._pipe.poll(_CHECK_MS):
                self._idle()
            elif not os.read(self._wake_pipe, _LINE_BYTES) and words[0] == self._read:
                raise RingClosedError


def shared_descriptor(size: int) -> int:
    """Return a descriptor of shared memory without a name, so that none is left behind. Raises `OSError`."""
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
