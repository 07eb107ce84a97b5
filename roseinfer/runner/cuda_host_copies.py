"""Blocks between a GPU and pinned memory of the host, by its copy engines: no kernel, no multiprocessor.

Each direction has a stream of its own, for PCIe moves both at the same time. A block is one contiguous copy of all
layers of one shape, some megabytes; all those of a step and a direction are queued by one call of the driver
(`cuMemcpyBatchAsync`, CUDA 12.8), as one call each costs the host several microseconds.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from roseinfer.attention.host_store import HostStore
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.plan import HostCopy
from roseinfer.runner.host_copies import CopyTimes, StepCopies

# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets there, not before.
_STREAM_ORDER = 1


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: order of access, hints of where source and target are (type, id), flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CopyDriver:
    """Queues many copies at once on a stream; one by one where the driver is older than that."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._batch = getattr(library, "cuMemcpyBatchAsync", None)
        self._one = library.cuMemcpyAsync
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._one.argtypes = (pointer, pointer, size, pointer)
        if self._batch is not None:
            attributes = ctypes.POINTER(_Attributes)
            places = ctypes.POINTER(size)
            self._batch.argtypes = (pointer, pointer, pointer, size, attributes, places, size, places, pointer)

    def copy(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        """targets, sources: addresses, sizes: bytes, each [n] uint64 contiguous. Raises `RuntimeError`."""
        if self._batch is None:
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                _check(self._one(target, source, size, stream))
            return
        attributes, first, failed = _Attributes(order=_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
        lists = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
        _check(self._batch(*lists, len(sizes), attributes, first, 1, failed, stream))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"a copy between the GPU and host memory could not be queued (CUDA driver error {error})")


class CudaCopier:
    """Steps run on the stream that is current when it is made."""

    overlaps_steps = True

    def __init__(self, store: KVStore, host: HostStore) -> None:
        device = store.parts[0].device
        self._memory = store, host  # the pages are pinned as long as the host store is there, not its parts
        self._steps = torch.cuda.current_stream(device)
        driver = CopyDriver()
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
    """Where blocks are. parts: [num_blocks, bytes of a block] uint8 each, contiguous; they live as long as this does,
    for nobody else needs to hold those of the host.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = tuple(parts)
        self._bases = np.array([[part.data_ptr()] for part in parts], np.uint64)
        self._widths = np.array([[part.shape[1]] for part in parts], np.uint64)

    def of(self, blocks: Sequence[int]) -> np.ndarray:
        """Of these blocks in the first part, then in the next one: [parts * blocks] uint64."""
        return (self._bases + self._widths * np.array(blocks, np.uint64)).reshape(-1)

    def sizes(self, count: int) -> np.ndarray:
        """Bytes of so many blocks, in the same order."""
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
        """Copy block sources[i] to targets[i] of every part, behind `begin`. None if there are none."""
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
    """How long they took on the device, once it is done with them; 0 for none."""
    if timed is None:
        return 0.0
    first, last = timed
    last.synchronize()
    return first.elapsed_time(last) / 1000
