"""Weights in MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 codes of 4 bits (e2m1) with a scale of 8 bits (e8m0).

A code is a sign and one of eight magnitudes, and a scale s stands for 2^(s - 127); 255 stands for NaN. A byte has two
codes. In a checkpoint these are neighbours, the first one in the low bits. Here byte 2i of a block has codes i and i +
16, and byte 2i + 1 codes i + 8 and i + 24. So four adjacent bytes are a word as `code_order` describes it: all that a
thread of the matrix units wants of a block, with neighbours 16 bits apart.
"""

from itertools import pairwise

import torch

BLOCK_ELEMENTS = 32
MAX_SCALE = 255  # stands for NaN
_BYTES = BLOCK_ELEMENTS // 2
# Of codes 0 to 7; the others have a sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAX_EXPONENT = 2  # of a magnitude


def reordered(stored: torch.Tensor) -> torch.Tensor:
    """Return blocks of neighbouring codes [.., 16] in the order of this module."""
    return _interleaved(torch.stack((stored & 15, stored >> 4), -1).flatten(-2))


def _interleaved(codes: torch.Tensor) -> torch.Tensor:
    """Return blocks [.., 32] of codes, one in a byte, as [.., 16] in the order of this module."""
    both = codes[..., :_BYTES] | codes[..., _BYTES:] << 4
    return both.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def codes_by_columns(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [.., K / 2], one in a byte, in the order of their columns: [.., K / 32, 32]."""
    blocks = codes.unflatten(-1, (-1, _BYTES // 2, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((blocks & 15, blocks >> 4), -1)


def widen_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers [.., K] of codes [.., K / 2] and scales [.., K / 32]. Those beyond `dtype` become infinite."""
    numbers = e2m1_numbers(codes_by_columns(codes))
    return (numbers * _factors(scales)[..., None]).flatten(-2).to(dtype)


def e2m1_numbers(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers of codes, one in a byte, in float32."""
    table = torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], device=codes.device)
    return table[codes.int()]


def round_mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of weights [.., K] near them. K: a multiple of 32.

    The scale puts a block's largest number at the largest exponent of a code, as in the specification.
    """
    blocks = weights.float().unflatten(-1, (-1, BLOCK_ELEMENTS))
    exponent = torch.frexp(blocks.abs().amax(-1)).exponent.int() - 1
    scales = (exponent - _MAX_EXPONENT + 127).clamp_(0, MAX_SCALE - 1).to(torch.uint8)
    scaled = blocks / _factors(scales)[..., None]
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1_MAGNITUDES)], device=weights.device)
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return _interleaved(codes).flatten(-2), scales


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """Return 2^(s - 127) of scales, in float32, from its bits: 2^-127 has an exponent of 0."""
    bits = scales.int() << 23
    bits = bits.masked_fill_(scales == 0, 1 << 22).masked_fill_(scales == MAX_SCALE, 0x7FC00000)
    return bits.view(torch.float32)
