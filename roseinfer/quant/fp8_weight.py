"""A weight in FP8 (e4m3fn): codes and the scales that they are multiplied by.

Two layouts of scales, whatever a checkpoint brings: one for each row (an output channel; a scalar becomes that), or one
for each block of 128 x 128.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.fp8_codes import CODES, MAX_CODE, SCALE_BLOCK

# The smallest magnitude that has a scale of its own: a normal number, so that a part of it is no zero to divide by.
LEAST = torch.finfo(torch.float32).tiny
TRIES = 32  # scales that are tried for a row
# x * this - (x * this - x) is x rounded to the four significant bits of a code (Veltkamp, 1968). The smallest codes
# have fewer, and do not matter to the sum.
_SPLIT = 2.0**20 + 1
# Weights that are tried at a time: what fits the cache of a CPU, and what keeps a GPU busy.
_PART = {False: 1 << 18, True: 1 << 25}


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The matrix codes * scales [N, K].

    codes: [N, K] float8_e4m3fn, contiguous, none of them NaN. scales: float32, [N] (channel) or
    [ceil(N / 128), ceil(K / 128)] (block).
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def is_block(self) -> bool:
        return self.scales.ndim == 2

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix itself, each element rounded once: [N, K] of `dtype`."""
        return self.codes.to(torch.float32).mul_(_spread(self.scales, self.codes)).to(dtype)

    @classmethod
    def of(cls, weight: torch.Tensor, *, block: bool = False) -> "Fp8Weight":
        """`weight` [N, K] of any float type, rounded with a scale for each row or block: its largest magnitude / 448.

        A row or block of zeros, or of less than `LEAST`, which becomes zeros, has a scale of one.
        """
        wide = weight.to(torch.float32)
        largest = _largest_of_blocks(wide) if block else wide.abs().amax(1)
        scales = torch.where(largest >= LEAST, largest / MAX_CODE, 1.0)
        return cls(_codes(wide, _spread(scales, wide)), scales)

    @classmethod
    def nearest(cls, weight: torch.Tensor) -> "Fp8Weight":
        """`weight` [N, K] rounded with the best of `TRIES` scales for each row, from its largest magnitude / 448 up to
        twice that, from where on codes only repeat.

        Best is the least sum of (error * weight)^2, so that errors of large weights count for more. In models that
        hold very large numbers in a few dimensions a few large weights make them, and with a scale that does not ask
        they come out wrong by as many per cent as chance rounds.
        """
        rows = max(1, _PART[weight.device.type == "cuda"] // weight.shape[1])
        scales = torch.cat([_best_scales(part) for part in weight.split(rows)])
        return cls(_codes(weight, scales[:, None]), scales)


def _best_scales(weight: torch.Tensor) -> torch.Tensor:
    largest = weight.abs().amax(1, keepdim=True).to(torch.float32)
    scale = torch.where(largest >= LEAST, largest / MAX_CODE, 1.0)
    exact = weight / scale
    best, least = torch.ones_like(scale), torch.full_like(scale, torch.inf)
    tried, high, low = (torch.empty_like(exact) for _ in range(3))
    for step in range(TRIES):
        factor = 1 + step / TRIES
        torch.mul(exact, 1 / factor, out=tried)
        torch.mul(tried, _SPLIT, out=high)
        torch.sub(high, tried, out=low)
        error = high.sub_(low).sub_(tried).mul_(exact)  # the rounded number - the tried one
        found = torch.linalg.vecdot(error, error)[:, None] * factor**2
        best.masked_fill_(found < least, factor)
        least = torch.minimum(least, found)
    return (scale * best)[:, 0]


def _codes(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight / scales).clamp_(-MAX_CODE, MAX_CODE).to(CODES)


def _spread(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The scale of each element of `weight` [N, K], in a shape that is multiplied with it."""
    if scales.ndim == 1:
        return scales[:, None]
    rows, columns = weight.shape
    return scales.repeat_interleave(SCALE_BLOCK, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :columns]


def _largest_of_blocks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    padded = F.pad(weight.abs(), (0, -columns % SCALE_BLOCK, 0, -rows % SCALE_BLOCK))
    return padded.view(-(-rows // SCALE_BLOCK), SCALE_BLOCK, -(-columns // SCALE_BLOCK), SCALE_BLOCK).amax((1, 3))
