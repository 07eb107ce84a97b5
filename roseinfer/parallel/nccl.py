"""NCCL between the GPUs of this machine, for tensors that are too large for our own kernels."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from roseinfer.parallel.forks import keep_in_forks

# NCCL's watchdog ends the process after this time. The thread that watches the ranks does so long before.
TIMEOUT_S = 600.0
# All ranks run on one machine: sockets only for the rendezvous, over loopback; neither multicast nor NVLink SHARP.
# PyTorch's monitor of NCCL would read the store every second for the life of the process, and might end the process.
_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class Nccl:
    """NCCL communicator. Its calls are queued on the current stream, and graphs can capture them."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        """Connect; returns once all ranks have joined. Sets environment variables until then."""
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
        """Replace x by the sum of all ranks' x, with the same bits on all ranks."""
        self._wait(self._nccl.allreduce([x], self._sum))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of all ranks: [size, *x.shape]."""
        out = x.new_empty((self._size, *x.shape))
        self._wait(self._nccl._allgather_base(out, x, self._columns))
        return out

    def _wait(self, work: Any) -> None:
        if work is not None:
            work.wait()

    def abort(self) -> None:
        """Abort running and waiting operations, from any thread."""
        self._nccl.abort()


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables that NCCL reads while it connects, and restore them for the rest of the process."""
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
