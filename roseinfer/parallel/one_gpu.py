"""Group of ranks that take turns on one GPU, for testing: our own kernels exchange tensors of all sizes.

NCCL rejects two ranks on one GPU. A GPU runs the kernels of one process at a time, so a rank that waits for another one
occupies it until its time slice ends.
"""

import torch
import torch.distributed as dist

from roseinfer.core.errors import ConfigError
from roseinfer.kernels.comm.peers import PeerLayout, Peers
from roseinfer.kernels.comm.push_blocks import gather_blocks, push_blocks
from roseinfer.parallel.cuda_group import START_TIMEOUT_S, CudaGroup, own_limit
from roseinfer.parallel.group import LiveGroup
from roseinfer.parallel.rendezvous import Rendezvous
from roseinfer.parallel.symmetric_memory import open_memory

# Of our kernels in a step. Longer than between GPUs: the rank that a kernel waits for computes only in its turns.
ONE_GPU_STEP_TIMEOUT_S = 30.0


class ChunkLibrary:
    """A `CommLibrary` that exchanges a tensor in chunks which our kernels support."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def all_reduce(self, x: torch.Tensor) -> None:
        for chunk in self._chunks(x):
            push_blocks(chunk, None, self._peers)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        size = self._peers.layout.size
        gathered = []
        for chunk in self._chunks(x):
            out = chunk.new_empty((1, size * chunk.numel()))
            gathered.append(gather_blocks(chunk.unsqueeze(0), out, self._peers).view(size, -1))
        return torch.cat(gathered, dim=1).view(size, *x.shape)

    def _chunks(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view(-1).split(self._peers.layout.limit // x.itemsize)

    def abort(self) -> None:
        """Do nothing: our kernels wait no longer than their timeout."""


def connect_on_one_gpu(host: LiveGroup, rendezvous: Rendezvous, device: torch.device) -> CudaGroup:
    """Connect ranks that all use `device`. Returns once all have joined.

    Raises `ConfigError` if they cannot share its memory.
    """
    rank, size = rendezvous.rank, rendezvous.size
    layout = PeerLayout(size, own_limit(size))
    store = dist.PrefixStore("memory", rendezvous.store)
    try:
        memory = open_memory(rendezvous.name, store, rank, size, layout.bytes, device)
    except RuntimeError as error:
        raise ConfigError(f"devices: the processes cannot share a GPU's memory; name several GPUs: {error}") from error
    peers = Peers.of(rank, layout, memory.addresses, device, START_TIMEOUT_S)
    return CudaGroup(host, ChunkLibrary(peers), peers, memory, ONE_GPU_STEP_TIMEOUT_S)
