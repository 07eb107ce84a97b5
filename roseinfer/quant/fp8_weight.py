"""Weight in FP8 (e4m3fn): codes and the scales that they are multiplied by.

There are two layouts of scales: one for each row (an output channel; a scalar is repeated), or one for each block of
128 x 128.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.fp8_codes import CODES, MAX_CODE, SCALE_BLOCK

# The smallest magnitude that has a scale of its own: a normal number, so that its 448th part is not zero.
MIN_MAGNITUDE = torch.finfo(torch.float32).tiny
TRIED_SCALE_COUNT = 32  # scales to try for a row
# x * this - (x * this - x) is x rounded to the four significant bits of a code (Veltkamp, 1968). The smallest codes
# have fewer bits, but do not matter to the sum.
_SPLIT_FACTOR = 2.0**20 + 1
# Weights that are rounded at a time: as many as fit a CPU's cache, and as many as keep a GPU busy.
PART_ELEMENTS = {False: 1 << 18, True: 1 << 25}


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Matrix codes * scales [N, K].

    codes: [N, K] float8_e4m3fn, contiguous, without NaN. scales: float32, [N] (channel) or [ceil(N / 128), ceil(K /
    128)] (block).
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def is_block(self) -> bool:
        return self.scales.ndim == 2

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix itself, each element rounded once: [N, K] of `dtype`."""
        return self.codes.to(torch.float32).mul_(_spread(self.scales, self.codes)).to(dtype)

    @classmethod
    def of(cls, weight: torch.Tensor, *, block: bool = False) -> "Fp8Weight":
        """Round `weight` [N, K] of any float type, with a scale for each row or block: its largest magnitude / 448.

        A row or block of zeros, or of magnitudes below `MIN_MAGNITUDE`, becomes zeros with a scale of one.
        """
        wide = weight.to(torch.float32)
        largest = _largest_of_blocks(wide) if block else wide.abs().amax(1)
        scales = torch.where(largest >= MIN_MAGNITUDE, largest / MAX_CODE, 1.0)
        return cls(_codes(wide, _spread(scales, wide)), scales)

    @classmethod
    def nearest(cls, weight: torch.Tensor) -> "Fp8Weight":
        """Round `weight` [N, K] with the best of `TRIED_SCALE_COUNT` scales for each row.

        Scales range from a row's largest magnitude / 448 to twice that, where the codes repeat. The best one has the
        smallest sum of (error * weight)^2, so that errors of large weights count more. Some models have very large
        numbers in a few dimensions, which come from a few large weights. With a scale that ignores this, those weights
        are off by as many per cent as the rounding happens to cost.
        """
        rows = max(1, PART_ELEMENTS[weight.device.type == "cuda"] // weight.shape[1])
        scales = torch.cat([_best_scales(part) for part in weight.split(rows)])
        return cls(_codes(weight, scales[:, None]), scales)


def _best_scales(weight: torch.Tensor) -> torch.Tensor:
    largest = weight.abs().amax(1, keepdim=True).to(torch.float32)
    scale = torch.where(largest >= MIN_MAGNITUDE, largest / MAX_CODE, 1.0)
    exact = weight / scale
    best, least = torch.ones_like(scale), torch.full_like(scale, torch.inf)
    tried, high, low = (torch.empty_like(exact) for _ in range(3))
    for step in range(TRIED_SCALE_COUNT):
        factor = 1 + step / TRIED_SCALE_COUNT
        torch.mul(exact, 1 / factor, out=tried)
        torch.mul(tried, _SPLIT_FACTOR, out=high)
        torch.sub(high, tried, out=low)
        error = high.sub_(low).sub_(tried).mul_(exact)  # rounded - exact
        found = torch.linalg.vecdot(error, error)[:, None] * factor**2
        best.masked_fill_(found < least, factor)
        least = torch.minimum(least, found)
    return (scale * best)[:, 0]


def _codes(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight / scales).clamp_(-MAX_CODE, MAX_CODE).to(CODES)


def _spread(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of each element of `weight` [N, K], in a shape that broadcasts with it."""
    if scales.ndim == 1:
        return scales[:, None]
    rows, columns = weight.shape
    return scales.repeat_interleave(SCALE_BLOCK, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :columns]


def _largest_of_blocks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    padded = F.pad(weight.abs(), (0, -columns % SCALE_BLOCK, 0, -rows % SCALE_BLOCK))
    return padded.view(-(-rows // SCALE_BLOCK), SCALE_BLOCK, -(-columns // SCALE_BLOCK), SCALE_BLOCK).amax((1, 3))
