"""Groups of four bits in words and bytes, the low ones first."""

import torch

from roseinfer.parallel.group import Share
from roseinfer.quant.int4_weight import MAX_CODE

WORD_COLUMNS = 8  # codes in a word of 32 bits


def words_of(share: Share) -> Share:
    """Return the words that hold a share of codes."""
    first, end = share.start // WORD_COLUMNS, -(-(share.start + share.width) // WORD_COLUMNS)
    return Share(first, end - first, -(-share.whole // WORD_COLUMNS))


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of bytes or of int32 words [.., n] in their order: [.., 2n] or [.., 8n] uint8."""
    # A copy, since a view as bytes refuses the strides that a dimension of one entry may have.
    halves = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack((halves & MAX_CODE, halves >> 4), -1).flatten(-2)


def packed_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [.., 2n] uint8 as bytes [.., n]: the inverse of `unpacked`."""
    return codes[..., ::2] | codes[..., 1::2] << 4
