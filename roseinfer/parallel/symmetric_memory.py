"""Memory of each GPU that the others of this machine may write, by PyTorch's symmetric memory.

Its handles go from process to process by a Unix socket. Multicast stays off: nothing here needs it, and where a
hypervisor forbids it even asking for it fails.
"""

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

_SETTINGS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def all_reach_each_other(size: int) -> bool:
    """Whether each of the first `size` GPUs may read and write the others' memory."""
    pairs = ((a, b) for a in range(size) for b in range(size) if a != b)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


def open_memory(
    name: str, store: dist.Store, rank: int, size: int, num_bytes: int, device: torch.device
) -> tuple[list[int], object]:
    """So many bytes of each rank, zeros: their addresses as `device` knows them, and what keeps them.

    name: of the group, the same on all ranks, and once in a process. All ranks call this at the same time. Sets this
    process's environment for it. Raises RuntimeError where the driver refuses.
    """
    os.environ.update(_SETTINGS)
    # Its versions ask for the group in one of two ways.
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, size)
    _register_process_group(name, group)  # type: ignore[arg-type]
    _SymmetricMemory.set_group_info(name, rank, size, dist.PrefixStore("memory", store))
    memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    memory.zero_()
    torch.cuda.synchronize(device)  # before anybody else knows of it
    handle = _SymmetricMemory.rendezvous(memory, name)
    return list(handle.buffer_ptrs), (memory, handle)
