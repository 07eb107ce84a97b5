"""Weights in MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 codes of 4 bits (e2m1) with a scale of 8 bits (e8m0).

A code is a sign and one of eight magnitudes, and a scale s stands for 2^(s - 127); 255 stands for NaN. A byte has two
codes. In a checkpoint these are neighbours, the first one in the low bits. Here a block's low bits are its first 16
numbers, and the high bits the other 16, as in GGUF: kernels then find 16 neighbours in the low bits of as many bytes.
"""

from itertools import pairwise

import torch

BLOCK_ELEMENTS = 32
MAX_SCALE = 255  # stands for NaN
_BYTES = BLOCK_ELEMENTS // 2
# Magnitudes, then the same with a sign.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAX_EXPONENT = 2  # of a magnitude


def halved(stored: torch.Tensor) -> torch.Tensor:
    """Return blocks of neighbouring codes [.., 16] in the order of this module."""
    codes = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
    return codes[..., :_BYTES] | codes[..., _BYTES:] << 4


def widen_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers [.., K] of codes [.., K / 2] and scales [.., K / 32]. Those beyond `dtype` become infinite."""
    blocks = codes.unflatten(-1, (-1, _BYTES))
    numbers = e2m1_numbers(torch.cat((blocks & 15, blocks >> 4), -1))
    return (numbers * _factors(scales)[..., None]).flatten(-2).to(dtype)


def e2m1_numbers(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers of codes, one in a byte, in float32."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
    return table[codes.int()]


def round_mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of weights [.., K] near them. K: a multiple of 32.

    The scale puts a block's largest number at the largest exponent of a code, as in the specification.
    """
    blocks = weights.float().unflatten(-1, (-1, BLOCK_ELEMENTS))
    exponent = torch.frexp(blocks.abs().amax(-1)).exponent.int() - 1
    scales = (exponent - _MAX_EXPONENT + 127).clamp_(0, MAX_SCALE - 1).to(torch.uint8)
    scaled = blocks / _factors(scales)[..., None]
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(_VALUES)], device=weights.device)
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return (codes[..., :_BYTES] | codes[..., _BYTES:] << 4).flatten(-2), scales


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """Return 2^(s - 127) of scales, in float32, from its bits: 2^-127 has an exponent of 0."""
    bits = scales.int() << 23
    bits = bits.masked_fill_(scales == 0, 1 << 22).masked_fill_(scales == MAX_SCALE, 0x7FC00000)
    return bits.view(torch.float32)
