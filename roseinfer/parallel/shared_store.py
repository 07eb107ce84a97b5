"""What processes tell each other before they are connected, by memory that they share."""

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

_PAUSE_S = 1e-3  # between looks
# As others of PyTorch's.
_PATIENCE = timedelta(minutes=5)
_HEAD = struct.Struct("<II")  # bytes of key and value, which follow


class SharedStore(dist.Store):
    """`torch.distributed`'s table of values by key, over a file that need not have a name.

    The file holds one entry after the other, of which the last of a key counts; whoever reads or adds has it locked.
    One object for a process: `PrefixStore` divides it. PyTorch calls it by way of the Python object, which whoever uses
    it has to keep.
    """

    def __init__(self, descriptor: int, go_on: Callable[[], None] = lambda: None) -> None:
        """descriptor: of the file, empty at first, the same in all processes; may be closed. go_on: called while this
        waits, and may raise.
        """
        super().__init__()
        self._file = os.dup(descriptor)
        weakref.finalize(self, os.close, self._file)
        self._go_on = go_on
        self._table: dict[str, bytes] = {}
        self._end = 0  # of what was read
        self._lock = threading.Lock()

    def clone(self) -> "SharedStore":
        return self

    def set(self, key: str, value: str | bytes) -> None:
        with self._locked():
            self._put(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Waits for it, as `wait` does."""
        self.wait([key])
        return self._table[key]

    def add(self, key: str, amount: int) -> int:
        """Counts from 0 on; the value is the number in digits."""
        with self._locked():
            total = int(self._table.get(key, b"0")) + amount
            self._put(key, b"%d" % total)
        return total

    def check(self, keys: list[str]) -> bool:
        with self._locked():
            return self._table.keys() >= {*keys}

    def wait(self, keys: list[str], timeout: timedelta = _PATIENCE) -> None:
        """Raises `DistStoreError` if they do not come."""
        until = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"waited in vain for what other processes say of {', '.join(keys)}")
            self._pause()

    def _pause(self) -> None:
        self._go_on()
        time.sleep(_PAUSE_S)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else reads or writes, and all that was written is known."""
        with self._lock:
            self._lock_file()
            try:
                self._read()
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _lock_file(self) -> None:
        """Who has it may be stopped."""
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
            keys, values = _HEAD.unpack_from(data, at)
            value_at = at + _HEAD.size + keys
            at = value_at + values
            self._table[data[value_at - keys : value_at].decode()] = data[value_at:at]
        self._end += at

    def _put(self, key: str, value: bytes) -> None:
        name = key.encode()
        entry = b"".join((_HEAD.pack(len(name), len(value)), name, value))
        os.pwrite(self._file, entry, self._end)
        self._end += len(entry)
        self._table[key] = value
