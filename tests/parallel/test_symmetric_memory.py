"""What processes tell each other before they share the memory of their GPUs, where there is none."""

import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from roseinfer.parallel.symmetric_memory import RenumberedStore

PATIENCE = timedelta(seconds=20)


def exchange(store: dist.Store, rank: int, count: int) -> list[bytes]:
    """As PyTorch does, once its process has done it `count` times: all write, all read, all wait for all."""
    # PyTorch calls the store from C++, as this does.
    seen = dist.PrefixStore("group", store)
    keys = [f"CUDASymmetricMemory/{count}/{other}" for other in range(2)]
    seen.set(keys[rank], bytes([0, 255, rank]))  # type: ignore[arg-type]  # which takes bytes too
    seen.wait(keys, PATIENCE)
    seen.wait(keys)
    values = [seen.get(key) for key in keys]
    assert values == seen.multi_get(keys)
    barrier = f"CUDASymmetricMemory/{count + 1}"
    if hasattr(seen, "barrier"):  # of later versions of PyTorch
        seen.barrier(barrier, 2, PATIENCE)
    else:
        seen.add(barrier, 1)
    assert seen.check([keys[0]])
    return values


def test_a_process_that_had_a_group_before_meets_one_that_had_none(tmp_path: Path) -> None:
    found: dict[int, list[bytes]] = {}

    def meet(rank: int, before: int) -> None:
        file = dist.FileStore(str(tmp_path / "store"), 2)
        found[rank] = exchange(RenumberedStore(dist.PrefixStore("memory", file)), rank, before)

    other = threading.Thread(target=meet, args=(1, 0))
    other.start()
    meet(0, 12)
    other.join(60)
    assert found == {rank: [bytes([0, 255, 0]), bytes([0, 255, 1])] for rank in range(2)}
