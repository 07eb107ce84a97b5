"""Blocks of K and V on their way between the device and the memory of the host."""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from roseinfer.attention.host_store import HostStore
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.plan import HostCopy

_TIMED_BLOCKS = 32


class CopyTimes(NamedTuple):
    """Seconds that all loads of a step took, and all of its stores; 0 where there were none."""

    load_s: float = 0.0
    store_s: float = 0.0


class StepCopies(Protocol):
    """What `Copier.start` has begun."""

    def wait(self) -> CopyTimes:
        """Block until all of them are done."""
        ...


class Copier(Protocol):
    """Moves whole blocks, in every layer: `loads` from the host's blocks to the device's, `stores` the other way.

    Both begin once the device has done what it was given so far. No block is in both, or is a destination twice, and
    nobody else touches one until `wait` returns. `overlaps_steps`: work given after `start` need not wait for
    them.
    """

    overlaps_steps: bool

    def start(self, loads: Sequence[HostCopy], stores: Sequence[HostCopy]) -> StepCopies: ...

    def close(self) -> None:
        """Return once nothing is under way: the memory may go then."""
        ...


class _Done(NamedTuple):
    times: CopyTimes

    def wait(self) -> CopyTimes:
        return self.times


class CpuCopier:
    """Between two tensors of the same memory: `start` does it at once, so the rows of the step wait for it."""

    overlaps_steps = False

    def __init__(self, store: KVStore, host: HostStore) -> None:
        self._parts = tuple(zip(store.blocks, host.parts, strict=True))

    def start(self, loads: Sequence[HostCopy], stores: Sequence[HostCopy]) -> StepCopies:
        began = perf_counter()
        for device, host in self._parts:
            for block, place in stores:
                host[place].copy_(device[block])
        stored = perf_counter()
        for device, host in self._parts:
            for block, place in loads:
                device[block].copy_(host[place])
        loaded = perf_counter()
        return _Done(CopyTimes(loaded - stored if loads else 0.0, stored - began if stores else 0.0))

    def close(self) -> None:
        """Nothing is under way between calls."""


def time_copies(copier: Copier, num_blocks: int, num_host_blocks: int) -> CopyTimes:
    """Seconds that one block takes each way, among some that are copied together. Overwrites the first blocks of both
    sides.
    """
    count = min(_TIMED_BLOCKS, num_blocks, num_host_blocks)
    pairs = [HostCopy(number, number) for number in range(count)]
    for _ in range(2):  # the first time also pays for pages, and for what the driver does but once
        stored = copier.start([], pairs).wait().store_s
        loaded = copier.start(pairs, []).wait().load_s
    return CopyTimes(loaded / count, stored / count)
