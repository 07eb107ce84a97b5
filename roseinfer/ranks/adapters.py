"""Adapters of an engine whose model several processes share: each rank reads its own part of the same files."""

from collections import deque
from typing import NamedTuple

from roseinfer.core.adapters import AdapterFiles, AdapterRead
from roseinfer.ranks.boot import RankRead
from roseinfer.ranks.calls import CallWriter
from roseinfer.ranks.other_ranks import OtherRanks


class _Problem(NamedTuple):
    """Reason not to use an adapter, and the digests under which ranks hold parts of it."""

    error: str
    held: set[str]


class LeadingAdapters:
    """`AdapterFiles` of rank 0. A read ends when all ranks have read the same content.

    For the thread that calls the runner: other ranks get reads and plans in one order.
    """

    def __init__(self, files: AdapterFiles, others: OtherRanks) -> None:
        """files: this process's. All ranks have read those of the options by themselves."""
        self._files = files
        self._others = others
        self._calls = CallWriter()
        self._ready = files.take_read()
        self._own: deque[AdapterRead] = deque()  # not yet read by all ranks
        self._held = {result.adapter.digest for result in self._ready if result.adapter is not None}
        self._unusable: set[str] = set()  # what ranks may hold parts of, to be freed after all reads
        self._num_reading = 0

    def read(self, name: str, path: str) -> None:
        self._num_reading += 1
        self._others.send(self._calls.read(name, path))
        self._files.read(name, path)

    def take_read(self) -> list[AdapterRead]:
        self._own += self._files.take_read()
        done, self._ready = self._ready, []
        while self._own and (others := self._others.take_reads()) is not None:
            self._num_reading -= 1
            done.append(self._combined(self._own.popleft(), others))
        if not self._num_reading:  # else a later read may hold the same content on all ranks
            for digest in self._unusable - self._held:
                self.forget(digest)
            self._unusable.clear()
        return done

    def forget(self, digest: str) -> None:
        self._held.discard(digest)
        self._others.send(self._calls.forget(digest))
        self._files.forget(digest)

    def _combined(self, own: AdapterRead, others: list[RankRead]) -> AdapterRead:
        problem = _problem(own, others)
        if problem is None:
            assert own.adapter is not None
            self._held.add(own.adapter.digest)
            return own
        self._unusable |= problem.held
        return own._replace(adapter=None, error=problem.error)


def _problem(own: AdapterRead, others: list[RankRead]) -> _Problem | None:
    """Return what is wrong with the results of one read; None if all ranks have the same adapter."""
    digests = [own.adapter.digest if own.adapter is not None else "", *(other.digest for other in others)]
    held = {digest for digest in digests if digest}
    if len(held) == 1 and all(digests):
        return None
    error = own.error or next((other.error for other in others if other.error), None)
    return _Problem(error or f"{own.path}: the files changed while they were read", held)
