"""Store for the rendezvous of ranks, in a file that they inherit.

Unlike PyTorch's `TCPStore` it needs no port, which other users of the machine could connect to. Unlike `FileStore` it
needs no name in the file system, and its waits end when a rank is lost.
"""

import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

_POLL_S = 1e-3
_TIMEOUT = timedelta(minutes=5)  # as of PyTorch's stores
_HEADER = struct.Struct("<II")  # lengths of the key and the value that follow


class SharedStore(dist.Store):
    """A `torch.distributed` store over a file, which need not have a name.

    The file is a log of entries; the last one of a key counts. Each access locks the file. A process makes one object
    and divides it by `PrefixStore`. PyTorch calls the Python object, so its user must keep a reference.
    """

    def __init__(self, descriptor: int, on_wait: Callable[[], None] = lambda: None) -> None:
        """descriptor: of the file, empty at first, the same in all processes; the caller may close it.

        on_wait: called during waits; may raise to end them.
        """
        super().__init__()
        self._file = os.dup(descriptor)
        weakref.finalize(self, os.close, self._file)
        self._on_wait = on_wait
        self._table: dict[str, bytes] = {}
        self._end = 0  # of what was read
        self._lock = threading.Lock()

    def clone(self) -> "SharedStore":
        return self

    def set(self, key: str, value: str | bytes) -> None:
        with self._locked():
            self._put(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return the value of a key. Waits for it as `wait` does."""
        self.wait([key])
        return self._table[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its value. It is stored as decimal digits."""
        with self._locked():
            total = int(self._table.get(key, b"0")) + amount
            self._put(key, b"%d" % total)
        return total

    def check(self, keys: list[str]) -> bool:
        with self._locked():
            return self._table.keys() >= {*keys}

    def wait(self, keys: list[str], timeout: timedelta = _TIMEOUT) -> None:
        """Wait until all keys are set. Raises `DistStoreError` after the timeout."""
        until = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"timed out waiting for keys of other processes: {', '.join(keys)}")
            self._pause()

    def _pause(self) -> None:
        self._on_wait()
        time.sleep(_POLL_S)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file, and read what other processes have added."""
        with self._lock:
            self._lock_file()
            try:
                self._read()
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _lock_file(self) -> None:
        # Polls, as the process that holds the lock may be stopped.
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                self._pause()

    def _read(self) -> None:
        data = os.pread(self._file, os.fstat(self._file).st_size - self._end, self._end)
        at = 0
        while at < len(data):
            keys, values = _HEADER.unpack_from(data, at)
            value_at = at + _HEADER.size + keys
            at = value_at + values
            self._table[data[value_at - keys : value_at].decode()] = data[value_at:at]
        self._end += at

    def _put(self, key: str, value: bytes) -> None:
        name = key.encode()
        entry = b"".join((_HEADER.pack(len(name), len(value)), name, value))
        os.pwrite(self._file, entry, self._end)
        self._end += len(entry)
        self._table[key] = value
