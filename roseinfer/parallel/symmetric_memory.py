"""Memory of each GPU that the others of this machine may write, by PyTorch's symmetric memory.

Its handles go from process to process by a Unix socket. Multicast stays off: nothing here needs it, and where a
hypervisor forbids it even asking for it fails.
"""

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

_SETTINGS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def all_reach_each_other(size: int) -> bool:
    """Whether each of the first `size` GPUs may read and write the others' memory."""
    pairs = ((a, b) for a in range(size) for b in range(size) if a != b)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """`addresses`: of each rank's bytes, as this rank's device knows them. The memory goes with the last reference to
    `kept`, so that a kernel that still runs writes to no other's.
    """

    name: str
    addresses: list[int]
    kept: tuple[Any, ...]

    def close(self) -> None:
        """PyTorch knows the group no longer. May be called again."""
        _unregister_process_group(self.name)  # type: ignore[arg-type]


def open_memory(
    name: str, store: dist.Store, rank: int, size: int, num_bytes: int, device: torch.device
) -> SharedMemory:
    """So many bytes of each rank, zeros.

    name: of the group, the same on all ranks, and once in a process. All ranks call this at the same time. Sets this
    process's environment for it. Raises RuntimeError where the driver refuses.
    """
    os.environ.update(_SETTINGS)
    store = RenumberedStore(store)
    # Its versions ask for the group in one of two ways.
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, size)
    _register_process_group(name, group)  # type: ignore[arg-type]
    try:
        _SymmetricMemory.set_group_info(name, rank, size, dist.PrefixStore("memory", store))
        memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        memory.zero_()
        torch.cuda.synchronize(device)  # before anybody else knows of it
        handle = _SymmetricMemory.rendezvous(memory, name)
    except BaseException:
        _unregister_process_group(name)  # type: ignore[arg-type]
        raise
    return SharedMemory(name, list(handle.buffer_ptrs), (memory, handle, group, store))


class RenumberedStore(dist.Store):
    """A store through which processes find each other's values though each numbers them by what it did before.

    PyTorch counts the exchanges of symmetric memory in a process and names keys `<what>/<count>...` by that. A process
    that has had a group before, as one with a second model, would look for others' values under numbers of its own.
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
