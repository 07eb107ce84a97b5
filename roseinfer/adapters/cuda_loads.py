"""Copies of adapters from pinned host memory to slots on a GPU, beside steps."""

import numpy as np
import torch

from roseinfer.adapters.slots import DeviceSlots, HostAdapter
from roseinfer.kernels.common.memory_copies import CopyDriver


class CudaSlotLoader:
    """`SlotLoader` with a stream of its own.

    Copies do not wait for steps: a slot is replaced when no row has it, also no row of a step in flight. Kernels read
    no more of a slot than its adapter's ranks, so the rest stays as it is.
    """

    def __init__(self, slots: DeviceSlots) -> None:
        self._slots = slots
        self._driver = CopyDriver()
        self._stream = torch.cuda.Stream(slots.device)
        self._stream.wait_stream(torch.cuda.current_stream(slots.device))  # which fills new slots with zeros
        self._copying: list[HostAdapter] = []  # their memory is read

    def start(self, slot: int, adapter: HostAdapter) -> None:
        ranks = torch.tensor(self._slots.hold(slot, adapter), dtype=torch.int32).pin_memory()
        with torch.cuda.stream(self._stream):
            self._slots.ranks[:, slot] = ranks.to(self._slots.device, non_blocking=True)
        targets, sources, sizes = copies_of(self._slots, slot, adapter)
        if sizes.size:
            self._driver.copy(targets, sources, sizes, self._stream.cuda_stream)
        self._copying.append(adapter)

    def finish(self) -> None:
        self._stream.synchronize()
        self._copying.clear()


def copies_of(slots: DeviceSlots, slot: int, adapter: HostAdapter) -> np.ndarray:
    """Return targets, sources and sizes in bytes of an adapter's copies to a slot: [3, n] uint64."""
    copies = []
    for layer, content in zip(slots.layers, adapter.layers, strict=True):
        if content is not None:
            pairs = ((layer.a, content.a), (layer.b, content.b))
            for to, of in pairs:
                first = to.data_ptr() + slot * to.stride(0) * to.itemsize
                copies.append((first, of.data_ptr(), of.numel() * of.itemsize))
    return np.array(copies, np.uint64).reshape(-1, 3).T.copy()
