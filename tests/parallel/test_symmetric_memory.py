"""Rendezvous of processes that share the memory of their GPUs, tested without GPUs."""

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from roseinfer.parallel import symmetric_memory
from roseinfer.parallel.cuda_group import CudaGroup
from roseinfer.parallel.group import SingleRank
from roseinfer.parallel.symmetric_memory import RenumberedStore, open_memory

TIMEOUT = timedelta(seconds=20)


def exchange(store: dist.Store, rank: int, count: int) -> list[bytes]:
    """Exchange values as PyTorch does in a process with `count` earlier exchanges: write, read, barrier."""
    # `PrefixStore` calls the store from C++, as PyTorch does.
    seen = dist.PrefixStore("group", store)
    keys = [f"CUDASymmetricMemory/{count}/{other}" for other in range(2)]
    seen.set(keys[rank], bytes([0, 255, rank]))  # type: ignore[arg-type]  # which takes bytes too
    seen.wait(keys, TIMEOUT)
    seen.wait(keys)
    values = [seen.get(key) for key in keys]
    assert values == seen.multi_get(keys)
    barrier = f"CUDASymmetricMemory/{count + 1}"
    if hasattr(seen, "barrier"):  # of later versions of PyTorch
        seen.barrier(barrier, 2, TIMEOUT)
    else:
        seen.add(barrier, 1)
    assert seen.check([keys[0]])
    return values


def test_processes_with_different_numbers_of_earlier_groups_meet(tmp_path: Path) -> None:
    found: dict[int, list[bytes]] = {}

    def meet(rank: int, before: int) -> None:
        file = dist.FileStore(str(tmp_path / "store"), 2)
        found[rank] = exchange(RenumberedStore(dist.PrefixStore("memory", file)), rank, before)

    other = threading.Thread(target=meet, args=(1, 0))
    other.start()
    meet(0, 12)
    other.join(60)
    assert found == {rank: [bytes([0, 255, 0]), bytes([0, 255, 1])] for rank in range(2)}


class Memory:
    """PyTorch's symmetric memory, without GPUs."""

    def __init__(self, refuses: bool) -> None:
        self._refuses = refuses

    def set_group_info(self, name: str, *args: object) -> None:
        assert is_known(name)

    def empty_strided_p2p(self, shape: tuple[int], strides: tuple[int], dtype: torch.dtype, device: Any) -> Any:
        return torch.empty_strided(shape, strides, dtype=dtype)

    def rendezvous(self, memory: torch.Tensor, name: str) -> Any:
        if self._refuses:
            raise RuntimeError("operation not permitted")
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr()])


def is_known(name: str) -> bool:
    try:
        _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return False
    return True


class Library:
    def abort(self) -> None:
        pass


@pytest.mark.parametrize("refuses", [False, True])
def test_a_closed_or_failed_group_is_unregistered_from_pytorch(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "_SymmetricMemory", Memory(refuses))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for _ in range(2):  # the name may be had again
        ask = "mine", dist.HashStore(), 0, 1, 64, torch.device("cpu")
        if refuses:
            with pytest.raises(RuntimeError, match="not permitted"):
                open_memory(*ask)
        else:
            memory = open_memory(*ask)
            assert is_known("mine") and len(memory.addresses) == 1
            group = CudaGroup(SingleRank(), Library(), None, memory)  # type: ignore[arg-type]
            group.close()
            group.close()
        assert not is_known("mine")
