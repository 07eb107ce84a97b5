"""NCCL between the GPUs of this machine: what is too large for one trip, and what several machines would need."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from roseinfer.parallel.forks import keep_in_forks

# After which its watchdog ends the process. Whoever watches the ranks does so long before.
TIMEOUT_S = 600.0
# All ranks are of one machine: sockets only to find each other, over loopback, and neither multicast nor NVLink SHARP.
# PyTorch's monitor of NCCL would look into the store every second for as long as the process lives. Where the file of
# that has been removed each look takes minutes, and the end of the group waits for it. Nor is it to end the process.
_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class Nccl:
    """Calls go to the current stream, in the same order on all ranks, and may be captured."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        """Returns once all ranks have come. Until then this process's environment is NCCL's."""
        with _environment(_SETTINGS):
            self._connect(store, rank, size, device)

    def _connect(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        kind: Any = dist.ProcessGroupNCCL  # PyTorch for CPUs has none
        options = kind.Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        self._size = size
        self._nccl = kind(store, rank, size, options)
        keep_in_forks(self._nccl)
        self._sum, self._columns = AllreduceOptions(), AllgatherOptions()
        self._sum.asyncOp = self._columns.asyncOp = False
        self.all_reduce(torch.zeros(1, device=device))  # connects, which must not happen within a capture
        self.gather(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)

    def all_reduce(self, x: torch.Tensor) -> None:
        """The sum of all ranks' x, in its place: the same bits on each."""
        self._wait(self._nccl.allreduce([x], self._sum))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of all ranks: [size, *x.shape]."""
        out = x.new_empty((self._size, *x.shape))
        self._wait(self._nccl._allgather_base(out, x, self._columns))
        return out

    def _wait(self, work: Any) -> None:
        if work is not None:
            work.wait()

    def abort(self) -> None:
        """End what runs and all that waits, from any thread."""
        self._nccl.abort()


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """NCCL reads it while it connects; what else the process runs, and starts, shall find its own."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
