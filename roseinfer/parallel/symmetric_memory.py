"""Memory of each GPU that the other GPUs of this machine may write, by PyTorch's symmetric memory.

PyTorch exchanges the handles over a Unix socket. Multicast stays off: it is not needed, and under some hypervisors the
attempt fails.
"""

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

# Ranks may share a GPU only if the options say so (`parallel.one_gpu`).
_SETTINGS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def all_reach_each_other(size: int) -> bool:
    """Return True if each of the first `size` GPUs may access the memory of the others."""
    pairs = ((a, b) for a in range(size) for b in range(size) if a != b)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory that all ranks may write.

    `addresses`: each rank's memory in this device's address space. `handle`: PyTorch's. `kept`: references that keep
    the memory allocated, so that a kernel that still runs does not write to reused memory.
    """

    name: str
    addresses: list[int]
    handle: Any = None
    kept: tuple[Any, ...] = ()

    def view(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` elements of a rank's memory from `offset` bytes on, a multiple of the element's size."""
        return self.handle.get_buffer(rank, (count,), dtype, offset // dtype.itemsize)

    def close(self) -> None:
        """Unregister the group from PyTorch. May be called again."""
        _unregister_process_group(self.name)  # type: ignore[arg-type]


def open_memory(
    name: str, store: dist.Store, rank: int, size: int, num_bytes: int, device: torch.device
) -> SharedMemory:
    """Allocate `num_bytes` zeros on each rank. All ranks call this at the same time.

    name: of the group, the same on all ranks, unique in a process. Sets environment variables of this process. Raises
    RuntimeError if the driver does not support it.
    """
    os.environ.update(_SETTINGS)
    store = RenumberedStore(store)
    # Versions of PyTorch look up the group in one of two ways.
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, size)
    _register_process_group(name, group)  # type: ignore[arg-type]
    try:
        _SymmetricMemory.set_group_info(name, rank, size, dist.PrefixStore("memory", store))
        memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        memory.zero_()
        torch.cuda.synchronize(device)  # zeros are written before another rank may write
        handle = _SymmetricMemory.rendezvous(memory, name)
    except BaseException:
        _unregister_process_group(name)  # type: ignore[arg-type]
        raise
    return SharedMemory(name, list(handle.buffer_ptrs), handle, (memory, group, store))


class RenumberedStore(dist.Store):
    """Store that renumbers PyTorch's keys, so that all ranks use the same ones.

    PyTorch counts a process's exchanges of symmetric memory and names keys `<what>/<count>...`. A process that has had
    an earlier group, for another model, would use other counts than the other ranks.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._shared(key), value)  # type: ignore[arg-type]  # which takes bytes too

    def get(self, key: str) -> bytes:
        return self._store.get(self._shared(key))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._shared(key), amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([*map(self._shared, keys)])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        shared = [*map(self._shared, keys)]
        self._store.wait(shared) if timeout is None else self._store.wait(shared, timeout)

    def _shared(self, key: str) -> str:
        return re.sub(r"(?<=/)\d+", self._counted, key, count=1)

    def _counted(self, number: re.Match[str]) -> str:
        count = int(number[0])
        if self._first is None:
            self._first = count
        return str(count - self._first)
