"""Blocks of GGUF files in four bits: Q4_0 with 32 columns and Q4_K with 256, both in groups of 32.

A value of Q4_0 is d * (q - 8). One of Q4_K is d * s * q - m * z, where s and z have six bits for each group.
"""

import torch

from roseinfer.quant.int4_layouts.nibbles import packed_pairs
from roseinfer.quant.int4_scheme import GGUF_GROUP_COLUMNS
from roseinfer.quant.int4_weight import MAX_CODE, Int4Weight

_BLOCK_BYTES = {"Q4_0": 18, "Q4_K": 144}
_HALF_BYTES = 2  # of a float16
_SCALE_BYTES = 12  # of the eight scales and the eight zeros of a block
_LOW_SIX, _LOW_FOUR = 0x3F, 0x0F


def read_blocks(encoding: str, raw: torch.Tensor) -> Int4Weight:
    """Return the weight of rows of blocks [rows, bytes] uint8."""
    blocks = raw.unflatten(1, (-1, _BLOCK_BYTES[encoding]))
    return _q4_k(blocks) if encoding == "Q4_K" else _q4_0(blocks)


def _q4_0(blocks: torch.Tensor) -> Int4Weight:
    scales = _halves(blocks[..., :_HALF_BYTES])[..., 0]
    return Int4Weight(_in_pairs(blocks[..., _HALF_BYTES:]), scales, None)


def _q4_k(blocks: torch.Tensor) -> Int4Weight:
    factors = _halves(blocks[..., : 2 * _HALF_BYTES]).to(torch.float32)
    packed, codes = blocks[..., 2 * _HALF_BYTES :].split((_SCALE_BYTES, blocks.shape[-1] - 4 - _SCALE_BYTES), -1)
    low_scales, low_zeros, rest = packed.split(4, -1)
    # The top two bits of the first four are the top two bits of the last four.
    scales = torch.cat((low_scales & _LOW_SIX, rest & _LOW_FOUR | (low_scales >> 6) << 4), -1)
    zeros = torch.cat((low_zeros & _LOW_SIX, rest >> 4 | (low_zeros >> 6) << 4), -1)
    return Int4Weight(
        _in_pairs(codes.unflatten(-1, (-1, GGUF_GROUP_COLUMNS))),
        (factors[..., :1] * scales).flatten(1),
        (factors[..., 1:] * zeros).flatten(1),
    )


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """Return the float16 numbers [.., n] of bytes [.., 2n]."""
    return raw.contiguous().view(torch.float16)


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes whose low halves come first, and then all high halves, as bytes with neighbours in a byte."""
    return packed_pairs(torch.cat((codes & MAX_CODE, codes >> 4), -1)).flatten(1)
