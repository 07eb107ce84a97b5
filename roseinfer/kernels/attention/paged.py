"""Helpers for kernels that read the paged KV cache, [num_blocks, block_size, kv_heads, D]."""

import torch

from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton

# Scores are scaled by it, so that exp2, for which the GPU has an instruction, can replace exp.
LOG2_E = 1.4426950408889634
_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)
# Window that is longer than any context. With one, tiles are masked by the first visible token.
ENDLESS_TOKENS = 1 << 30


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


def softmax_reference(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of scores [heads, .., keys], with a logit of each head [heads] more in the denominator."""
    if sinks is None:
        return scores.softmax(-1)
    more = sinks.float().view(-1, *[1] * (scores.ndim - 1)).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, more), -1).softmax(-1)[..., :-1]


@triton.jit
def no_peak(COUNT: tl.constexpr):
    """Return a maximum below any score, but finite, so that the difference of two such is 0."""
    return tl.full([COUNT], -1e38, tl.float32)


@triton.jit
def with_sinks(sinks, head, real, takes, peak, total, acc):
    """Return the peak, the total and the sums [heads, D_PAD] after adding the heads' sinks to the total, if this part
    of a row `takes` them. A row has to add them once.

    sinks: pointer to a logit of each head. head: numbers of the heads, of which only `real` ones have a sink.
    """
    sink = tl.load(sinks + head, mask=real & takes, other=0.0).to(tl.float32)
    sink = tl.where(real & takes, sink * _LOG2_E, -1e38)
    higher = tl.maximum(peak, sink)
    fade = tl.exp2(peak - higher)
    total = total * fade + tl.where(real & takes, tl.exp2(sink - higher), 0.0)
    return higher, total, acc * fade[:, None]


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
