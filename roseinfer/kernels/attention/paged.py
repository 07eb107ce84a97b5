"""Helpers for kernels that read the paged KV cache, [num_blocks, block_size, kv_heads, D]."""

import torch

from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton

# Scores are scaled by it, so that exp2, for which the GPU has an instruction, can replace exp.
LOG2_E = 1.4426950408889634


def padded_dim(head_dim: int) -> int:
    """Return the width of tiles for heads of this size: a power of two that the matrix units support."""
    return max(16, next_power_of_2(head_dim))


def gathered(
    cache: torch.Tensor, table: torch.Tensor, context: int, heads: int, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the first `context` tokens of a block table, [context, heads, D] float32.

    scales: [kv_heads], of codes.
    """
    blocks = table[: -(-context // cache.shape[1])].long()
    wide = cache[blocks].flatten(0, 1)[:context].float()
    if scales is not None:
        wide *= scales[:, None]
    return wide.repeat_interleave(heads // cache.shape[2], dim=1)


@triton.jit
def no_peak(COUNT: tl.constexpr):
    """Return a maximum below any score, but finite, so that the difference of two such is 0."""
    return tl.full([COUNT], -1e38, tl.float32)


@triton.jit
def blocks_of(table, position, context, BLOCK_SIZE: tl.constexpr):
    """Load the blocks of some tokens, without reading the table past a row's context."""
    return tl.load(table + position // BLOCK_SIZE, mask=position < context, other=0)


@triton.jit
def load_tokens(head, offset, inside, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load [tokens, D_PAD], zero outside of the context: a block's unused slots may contain NaN."""
    dim = tl.arange(0, D_PAD)
    mask = inside[:, None] & (dim < D)[None, :] if D_PAD > D else inside[:, None]
    return tl.load(head + offset[:, None] + dim[None, :], mask=mask, other=0.0)
