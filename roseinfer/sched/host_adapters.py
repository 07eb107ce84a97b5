"""LoRA adapters in host memory: copies within a budget, and reads of folders in the background."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from roseinfer.core.adapters import Adapter, AdapterFiles
from roseinfer.core.errors import ADAPTER_UNREADABLE

DEFAULT_READ_BYTES_PER_S = 1e9  # before any read was measured: a file in the page cache, hashed and converted
_READ_GAIN_SHARE = 0.5  # weight of a read in the smoothed seconds per byte


class _PendingRead(NamedTuple):
    """Read in progress. `digest`: what a waiting request needs."""

    name: str
    path: str
    num_bytes: int
    digest: str


class FailedRead(NamedTuple):
    """Read that did not give the adapter that requests wait for. Another folder may hold it."""

    digest: str
    path: str
    error: str


class HostAdapters:
    """Adapters that one engine holds in host memory, and its reads.

    `read_s_per_byte`: as measured by recent reads. `num_bytes`: size of the copies.
    """

    def __init__(self, files: AdapterFiles, budget_bytes: int, pinned: Sequence[Adapter] = ()) -> None:
        """`pinned`: adapters that are in host memory already, and stay there."""
        self.read_s_per_byte = 1 / DEFAULT_READ_BYTES_PER_S
        self.num_bytes = sum(adapter.num_bytes for adapter in pinned)
        self.reads = self.failures = 0
        self.reads_s = 0.0
        self._files, self._budget_bytes = files, budget_bytes
        self._pinned = {adapter.digest for adapter in pinned}
        # By digest, the least recently used first.
        self._copies: dict[str, Adapter] = {adapter.digest: adapter for adapter in pinned}
        self._pending: list[_PendingRead] = []

    def __contains__(self, digest: str) -> bool:
        return digest in self._copies

    @property
    def digests(self) -> Iterator[str]:
        """Iterate over the digests of all copies, the most recently used first."""
        return reversed(self._copies)

    @property
    def reading(self) -> bool:
        """True if a read is in progress."""
        return bool(self._pending)

    @property
    def is_over_budget(self) -> bool:
        return self.num_bytes > self._budget_bytes

    def read_s(self, adapter: Adapter) -> float:
        """Return the seconds until an adapter is in host memory, if a read begins now."""
        return 0.0 if adapter.digest in self._copies else adapter.num_bytes * self.read_s_per_byte

    # --- reads --------------------------------------------------------------------------------------------------
    def want(self, adapter: Adapter, needed: Callable[[str], bool], is_next: bool) -> None:
        """Begin to read an adapter that a request waits for, unless it is being read or there is no room for it.

        `needed(digest)`: True for copies that a waiting request needs. `is_next`: it is the next one to load; then it
        may exceed the budget, so that requests for a large adapter are served.
        """
        if any(read.digest == adapter.digest for read in self._pending):
            return
        reading = sum(read.num_bytes for read in self._pending)
        if self._make_room(reading + adapter.num_bytes, needed) or (is_next and not self._pending):
            self._begin(_PendingRead(adapter.name, adapter.path, adapter.num_bytes, adapter.digest))

    def _begin(self, read: _PendingRead) -> None:
        self._pending.append(read)
        self._files.read(read.name, read.path)

    def poll(self, needed: Callable[[str], bool]) -> list[FailedRead]:
        """Take in the reads that are done, also those of other callers. Return those that gave something else."""
        failed = []
        for read in self._files.take_read():
            self.reads += 1
            self.reads_s += read.seconds
            if read.adapter is not None:
                self._add(read.adapter, read.seconds)
            else:
                self.failures += 1
            pending = next((one for one in self._pending if (one.name, one.path) == (read.name, read.path)), None)
            if pending is None:
                continue
            self._pending.remove(pending)
            if pending.digest not in self._copies:
                problem = read.error or "its files have changed since it was loaded"
                error = f"{ADAPTER_UNREADABLE}{read.name!r}: {problem}"
                failed.append(FailedRead(pending.digest, read.path, error))
        self._make_room(0, needed)
        return failed

    def _add(self, adapter: Adapter, seconds: float) -> None:
        if adapter.num_bytes:
            self.read_s_per_byte += _READ_GAIN_SHARE * (seconds / adapter.num_bytes - self.read_s_per_byte)
        if adapter.digest not in self._copies:
            self.num_bytes += adapter.num_bytes
        self._copies[adapter.digest] = adapter

    # --- budget -------------------------------------------------------------------------------------------------
    def use(self, digest: str) -> None:
        """Mark a copy as the most recently used."""
        self._copies[digest] = self._copies.pop(digest)

    def _make_room(self, num_bytes: int, needed: Callable[[str], bool]) -> bool:
        """Forget copies until `num_bytes` more fit the budget. Return False if too few can be forgotten."""
        for digest, adapter in list(self._copies.items()):
            if self.num_bytes + num_bytes <= self._budget_bytes:
                break
            if digest not in self._pinned and not needed(digest):
                del self._copies[digest]
                self.num_bytes -= adapter.num_bytes
                self._files.forget(digest)
        return self.num_bytes + num_bytes <= self._budget_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError if copies and their size disagree."""
        assert self.num_bytes == sum(adapter.num_bytes for adapter in self._copies.values()), "bytes of host copies"
        assert self._pinned <= self._copies.keys(), "a pinned adapter was forgotten"
