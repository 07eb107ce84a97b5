"""Sums and gathered columns of several GPUs by our own kernels: one launch, the same bits on every rank."""

import torch

from roseinfer.kernels.comm.peers import Peers
from roseinfer.kernels.comm.push_blocks import gather_blocks, push_blocks
from roseinfer.kernels.comm.push_words import push_words

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes(x: torch.Tensor, peers: Peers) -> bool:
    """Return True if `all_reduce` supports a tensor like x: the same answer on all ranks."""
    return x.dtype in DTYPES and x.nbytes <= peers.layout.limit and x.nbytes % 8 == 0 and x.is_contiguous()


def all_reduce(x: torch.Tensor, residual: torch.Tensor | None, peers: Peers) -> torch.Tensor:
    """Return the sum of all ranks' x in the order of the ranks, plus a residual, in float32 and rounded once.

    `takes` must support x and a residual of its shape. The sum overwrites the residual, or else x.
    """
    push = push_words if x.nbytes <= peers.layout.word_limit else push_blocks
    return push(x, residual, peers)


def gather(x: torch.Tensor, out: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Gather x [n, width] of all ranks, supported by `takes`, side by side in `out`, whose rows may be apart."""
    return gather_blocks(x, out, peers)
