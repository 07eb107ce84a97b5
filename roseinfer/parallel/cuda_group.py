"""RankGroup of GPUs: our own kernels exchange small tensors in one step. Two GPUs exchange large sums in pieces. NCCL
exchanges all else.
"""

import contextlib
import logging
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from roseinfer.core.errors import EngineDeadError
from roseinfer.kernels.comm import all_reduce as kernels
from roseinfer.kernels.comm.peers import PeerLayout, Peers
from roseinfer.parallel.group import LiveGroup, Product, sum_whole
from roseinfer.parallel.piece_sums import PIECE_BYTES, PIECE_RANK_COUNT, PieceSums
from roseinfer.parallel.rendezvous import Rendezvous

if TYPE_CHECKING:
    from roseinfer.parallel.symmetric_memory import SharedMemory

logger = logging.getLogger(__name__)

# How long our kernels wait for another rank, while ranks load and compile and while they serve.
START_TIMEOUT_S, STEP_TIMEOUT_S = 300.0, 7.0
# Calls of our kernels that gather a large tensor. NCCL would gather in another order, which takes a copy.
MAX_GATHERS = 8
CLOSE_TIMEOUT_S = 3.0  # for NCCL to end; the process may exit without it


class CommLibrary(Protocol):
    """Interface of `Nccl`, which tests replace."""

    def all_reduce(self, x: torch.Tensor) -> None: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor: ...

    def abort(self) -> None: ...


class CudaGroup:
    """A `LiveGroup` whose exchanges are queued on the current stream and may be captured in graphs.

    NCCL may round the sum of a large tensor differently than our kernels round that of a small one. Pieces do not.
    """

    def __init__(
        self,
        host: LiveGroup,
        library: CommLibrary,
        peers: Peers | None,
        memory: "SharedMemory | None" = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
        pieces: PieceSums | None = None,
    ) -> None:
        """host: group of the same ranks' host processes. peers: None if GPUs cannot access each other's memory.

        memory: the memory of `peers`. step_timeout_s: of our kernels once `ready`. pieces: takes the sums that are too
        large for our kernels; None: the library does.
        """
        self.rank, self.size = host.rank, host.size
        self._host = host
        self._library = library
        self._peers = peers
        self._memory = memory
        self._pieces = pieces
        self._step_timeout_s = step_timeout_s

    def adds_residual(self, x: torch.Tensor) -> bool:
        taken = self._peers is not None and kernels.takes(x, self._peers)
        return taken or (self._pieces is not None and self._pieces.takes(x))

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self._peers is not None and kernels.takes(x, self._peers):
            return kernels.all_reduce(x, residual, self._peers)
        if self._pieces is not None and self._pieces.takes(x):
            return self._pieces.sum(x, residual)
        x = x.contiguous()
        self._library.all_reduce(x)
        return x if residual is None else residual.add_(x)

    def sum_products(self, product: Product, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self._pieces is not None and self._pieces.takes(residual):
            return self._pieces.sum(x, residual, lambda rows: product(rows, None))
        return sum_whole(self, product, x, residual)

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous()
        rows, width = x.shape
        if out is None:
            out = x.new_empty((rows, self.size * width))
        peers = self._peers
        if peers is not None and kernels.takes(x[:1], peers) and x.nbytes <= MAX_GATHERS * peers.layout.limit:
            most = peers.layout.limit // (width * x.itemsize)
            for some, to in zip(x.split(most), out.split(most), strict=True):
                kernels.gather(some, to, peers)
            return out
        out.view(rows, self.size, width).copy_(self._library.gather(x).transpose(0, 1))
        return out

    def minimum(self, value: int) -> int:
        return self._host.minimum(value)

    def ready(self) -> None:
        self._host.ready()
        if self._peers is not None:
            self._peers.patience.fill_(int(self._step_timeout_s * 1e9))

    def check(self) -> None:
        if self._peers is not None and bool(self._peers.lost):
            raise EngineDeadError(f"rank {self.rank} timed out waiting for another rank's part of a sum")

    def abort(self) -> None:
        self._end_library()
        self._host.abort()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # at interpreter exit no thread can start, and none is needed
            self._end_library().join(CLOSE_TIMEOUT_S)
        if self._memory is not None:
            self._memory.close()
        self._host.close()

    def _end_library(self) -> Thread:
        """Abort NCCL in a thread, as it may wait for kernels that wait for a lost rank, or for threads of its own."""
        thread = Thread(target=self._library.abort, name="nccl-abort", daemon=True)
        thread.start()
        return thread


def connect(host: LiveGroup, rendezvous: Rendezvous, device: torch.device) -> CudaGroup:
    """Connect the GPUs of `host`'s ranks, GPU n to rank n. Returns once all ranks have joined."""
    from roseinfer.parallel.nccl import Nccl
    from roseinfer.parallel.symmetric_memory import all_reach_each_other, open_memory

    rank, size, store = host.rank, host.size, rendezvous.store
    library = Nccl(dist.PrefixStore("nccl", store), rank, size, device)
    if not host.minimum(all_reach_each_other(size)):
        logger.warning("the GPUs cannot access each other's memory: NCCL exchanges all tensors, which is slow")
        return CudaGroup(host, library, None)
    layout = PeerLayout(size, own_limit(size), PIECE_BYTES if size == PIECE_RANK_COUNT else 0)
    memory = None
    try:
        memory = open_memory(rendezvous.name, dist.PrefixStore("memory", store), rank, size, layout.bytes, device)
    except RuntimeError as error:
        logger.warning("the GPUs' processes cannot share memory, so NCCL exchanges all tensors: %s", error)
    all_have_it = host.minimum(memory is not None)
    if memory is None:
        return CudaGroup(host, library, None)
    if not all_have_it:
        memory.close()
        return CudaGroup(host, library, None)
    peers = Peers.of(rank, layout, memory.addresses, device, START_TIMEOUT_S)
    pieces = None
    if size == PIECE_RANK_COUNT:
        pieces = PieceSums(peers, partial(memory.view, 1 - rank))
    return CudaGroup(host, library, peers, memory, pieces=pieces)


def own_limit(size: int) -> int:
    """Return the bytes of a tensor up to which our kernels are faster than NCCL.

    With our kernels each rank sends its whole tensor to every other. With more than two ranks, NCCL sends less.
    """
    return 8 << 20 if size == 2 else (2 << 20) // size
