"""Copies of KV blocks between a GPU and pinned host memory by copy engines, without kernels.

Each direction has its own stream, since PCIe moves both at the same time. A block is one contiguous copy of some
megabytes: all layers of one shape. One call queues all copies of a step and direction.
"""

from collections.abc import Sequence

import numpy as np
import torch

from roseinfer.attention.host_store import BlockStore, HostStore
from roseinfer.core.plan import HostCopy
from roseinfer.kernels.common.memory_copies import CopyDriver
from roseinfer.runner.host_copies import CopyTimes, StepCopies


class CudaCopier:
    """`Copier` of a GPU. Steps run on the stream that is current at construction."""

    overlaps_steps = True

    def __init__(self, store: BlockStore, host: HostStore, driver: CopyDriver | None = None) -> None:
        device = store.blocks[0].device
        self._memory = store, host  # the host store owns the pinned pages; its parts alone do not keep them
        self._steps = torch.cuda.current_stream(device)
        driver = driver or CopyDriver()
        self._loads = _CopyStream(driver, host.parts, store.blocks, device)
        self._stores = _CopyStream(driver, store.blocks, host.parts, device)

    def start(self, loads: Sequence[HostCopy], stores: Sequence[HostCopy]) -> StepCopies:
        begin = torch.cuda.Event()
        begin.record(self._steps)
        loading = self._loads.start(begin, [copy.host for copy in loads], [copy.block for copy in loads])
        storing = self._stores.start(begin, [copy.block for copy in stores], [copy.host for copy in stores])
        return _CudaCopies(loading, storing)

    def close(self) -> None:
        self._loads.stream.synchronize()
        self._stores.stream.synchronize()


class Addresses:
    """Addresses of blocks. parts: [num_blocks, bytes of a block] uint8 each, contiguous.

    The object keeps the parts alive, since it may be the only owner of those of the host.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = tuple(parts)
        self._bases = np.array([[part.data_ptr()] for part in parts], np.uint64)
        self._widths = np.array([[part.shape[1]] for part in parts], np.uint64)

    def of(self, blocks: Sequence[int]) -> np.ndarray:
        """Return the addresses of `blocks` in the first part, then in the next: [parts * blocks] uint64."""
        return (self._bases + self._widths * np.array(blocks, np.uint64)).reshape(-1)

    def sizes(self, count: int) -> np.ndarray:
        """Return the sizes of `count` blocks in bytes, in the same order."""
        return np.repeat(self._widths, count)


_Timed = tuple[torch.cuda.Event, torch.cuda.Event]


class _CopyStream:
    """Copies from some parts to others of the same widths, on one stream."""

    def __init__(
        self,
        driver: CopyDriver,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self.stream = torch.cuda.Stream(device)
        self._driver = driver
        self._sources, self._targets = Addresses(sources), Addresses(targets)

    def start(self, begin: torch.cuda.Event, sources: list[int], targets: list[int]) -> _Timed | None:
        """Copy block sources[i] to targets[i] of every part, after `begin`. Return None if there are no blocks."""
        if not sources:
            return None
        self.stream.wait_event(begin)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record(self.stream)
        sizes = self._sources.sizes(len(sources))
        self._driver.copy(self._targets.of(targets), self._sources.of(sources), sizes, self.stream.cuda_stream)
        last.record(self.stream)
        return first, last


class _CudaCopies:
    def __init__(self, loading: _Timed | None, storing: _Timed | None) -> None:
        self._loading = loading
        self._storing = storing

    def wait(self) -> CopyTimes:
        return CopyTimes(_seconds(self._loading), _seconds(self._storing))


def _seconds(timed: _Timed | None) -> float:
    """Wait for the copies and return their time on the device; 0 if there are none."""
    if timed is None:
        return 0.0
    first, last = timed
    last.synchronize()
    return first.elapsed_time(last) / 1000
