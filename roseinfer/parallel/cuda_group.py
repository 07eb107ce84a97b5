"""A group of GPUs: sums and columns by our own kernels while one trip is enough, beyond that by NCCL."""

import contextlib
import logging
from threading import Thread
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from roseinfer.core.errors import EngineDeadError
from roseinfer.kernels.comm import all_reduce as kernels
from roseinfer.kernels.comm.peers import PeerLayout, Peers
from roseinfer.parallel.group import LiveGroup
from roseinfer.parallel.rendezvous import Rendezvous

if TYPE_CHECKING:
    from roseinfer.parallel.symmetric_memory import SharedMemory

logger = logging.getLogger(__name__)

# How long our kernels wait for another rank: while ranks load and compile, and when they serve.
START_PATIENCE_S, STEP_PATIENCE_S = 300.0, 7.0
CLOSE_S = 3.0  # for NCCL to end, which is not worth more


class Library(Protocol):
    """`Nccl`."""

    def all_reduce(self, x: torch.Tensor) -> None: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor: ...

    def abort(self) -> None: ...


class CudaGroup:
    """See `LiveGroup`. All that is exchanged is queued on the current stream, and may be captured in graphs.

    Two sums of the same numbers may differ in their last bits if one is of so many that the library adds them up.
    """

    def __init__(
        self, host: LiveGroup, library: Library, peers: Peers | None, memory: "SharedMemory | None" = None
    ) -> None:
        """host: the same ranks, for what their hosts tell each other. peers: None where GPUs do not reach each other.

        memory: that of `peers`.
        """
        self.rank, self.size = host.rank, host.size
        self._host = host
        self._library = library
        self._peers = peers
        self._memory = memory

    def adds_residual(self, x: torch.Tensor) -> bool:
        return self._peers is not None and kernels.takes(x, self._peers)

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self._peers is not None and kernels.takes(x, self._peers):
            return kernels.all_reduce(x, residual, self._peers)
        x = x.contiguous()
        self._library.all_reduce(x)
        return x if residual is None else residual.add_(x)

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous()
        rows, width = x.shape
        if out is None:
            out = x.new_empty((rows, self.size * width))
        if self._peers is not None and kernels.takes(x, self._peers):
            return kernels.gather(x, out, self._peers)
        out.view(rows, self.size, width).copy_(self._library.gather(x).transpose(0, 1))
        return out

    def minimum(self, value: int) -> int:
        return self._host.minimum(value)

    def ready(self) -> None:
        self._host.ready()
        if self._peers is not None:
            self._peers.patience.fill_(int(STEP_PATIENCE_S * 1e9))

    def check(self) -> None:
        if self._peers is not None and bool(self._peers.lost):
            raise EngineDeadError(f"rank {self.rank} has waited in vain for another rank's part of a sum")

    def abort(self) -> None:
        self._end_library()
        self._host.abort()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # at the end of the interpreter no thread can be had, nor is one needed
            self._end_library().join(CLOSE_S)
        if self._memory is not None:
            self._memory.close()
        self._host.close()

    def _end_library(self) -> Thread:
        """NCCL may wait for kernels that wait for a rank that is gone, or for threads of its own."""
        thread = Thread(target=self._library.abort, name="nccl-abort", daemon=True)
        thread.start()
        return thread


def connect(host: LiveGroup, rendezvous: Rendezvous, device: torch.device) -> CudaGroup:
    """The group of the GPUs of `host`'s ranks, each the one of its rank's number; returns once all have come."""
    from roseinfer.parallel.nccl import Nccl
    from roseinfer.parallel.symmetric_memory import all_reach_each_other, open_memory

    rank, size, store = host.rank, host.size, rendezvous.store
    library = Nccl(dist.PrefixStore("nccl", store), rank, size, device)
    if not host.minimum(all_reach_each_other(size)):
        logger.warning(
            "the GPUs do not reach each other's memory: all that they exchange is left to NCCL, which is slow"
        )
        return CudaGroup(host, library, None)
    layout = PeerLayout(size, own_limit(size))
    memory = None
    try:
        memory = open_memory(rendezvous.name, dist.PrefixStore("memory", store), rank, size, layout.bytes, device)
    except RuntimeError as error:
        logger.warning("the GPUs' processes cannot share memory, all that they exchange is left to NCCL: %s", error)
    all_have_it = host.minimum(memory is not None)
    if memory is None:
        return CudaGroup(host, library, None)
    if not all_have_it:
        memory.close()
        return CudaGroup(host, library, None)
    return CudaGroup(host, library, Peers.of(rank, layout, memory.addresses, device, START_PATIENCE_S), memory)


def own_limit(size: int) -> int:
    """Bytes of x up to which our kernels are faster than NCCL.

    Each rank sends all it has to every other, which is all there is to send for two. For more, NCCL sends less.
    """
    return 8 << 20 if size == 2 else (2 << 20) // size
