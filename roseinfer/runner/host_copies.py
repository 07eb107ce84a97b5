"""Copies of KV blocks, and of slots of states, between the device and host memory."""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from roseinfer.attention.host_store import BlockStore, HostStore
from roseinfer.core.plan import HostCopy

_TIMED_BLOCKS = 32


class CopyTimes(NamedTuple):
    """Seconds of all loads and of all stores of a step; 0 without any."""

    load_s: float = 0.0
    store_s: float = 0.0


class StepCopies(Protocol):
    """Copies that `Copier.start` has begun."""

    def wait(self) -> CopyTimes:
        """Block until all of them are done."""
        ...


class Copier(Protocol):
    """Copies whole blocks in every layer: `loads` from host blocks to the device's, `stores` the other way.

    Both begin after the work that the device was given before. No block is in both, or the target of two copies, and
    other work must not use one until `wait` returns. overlaps_steps: work given after `start` need not wait for them.
    """

    overlaps_steps: bool

    def start(self, loads: Sequence[HostCopy], stores: Sequence[HostCopy]) -> StepCopies: ...

    def close(self) -> None:
        """Return once no copy is running, so that the memory can be freed."""
        ...


class BothCopies(NamedTuple):
    """Copies of KV blocks and of states that one step has begun."""

    blocks: StepCopies
    states: StepCopies

    def wait(self) -> CopyTimes:
        """Block until all of them are done, and return the sums."""
        blocks, states = self.blocks.wait(), self.states.wait()
        return CopyTimes(blocks.load_s + states.load_s, blocks.store_s + states.store_s)


class _Done(NamedTuple):
    times: CopyTimes

    def wait(self) -> CopyTimes:
        return self.times


class CpuCopier:
    """`Copier` within host memory. `start` copies at once, so the rows of the step wait for it."""

    overlaps_steps = False

    def __init__(self, store: BlockStore, host: HostStore) -> None:
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
        """Do nothing: no copy runs between calls."""


def time_copies(copier: Copier, num_blocks: int, num_host_blocks: int) -> CopyTimes:
    """Return the seconds that one block takes each way, among several that are copied together.

    This overwrites the first blocks on both sides.
    """
    count = min(_TIMED_BLOCKS, num_blocks, num_host_blocks)
    pairs = [HostCopy(number, number) for number in range(count)]
    for _ in range(2):  # the first run also pays for pages and one-time work of the driver
        stored = copier.start([], pairs).wait().store_s
        loaded = copier.start(pairs, []).wait().load_s
    return CopyTimes(loaded / count, stored / count)
