"""A weight in FP8 (e4m3fn): codes and the scales that they are multiplied by.

Two layouts of scales, whatever a checkpoint brings: one for each row (an output channel; a scalar becomes that), or one
for each block of 128 x 128.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 128  # rows and columns that share a scale, in the block layout
MAX_CODE = 448.0  # the largest finite e4m3fn


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

        A row or block of zeros has a scale of one.
        """
        wide = weight.to(torch.float32)
        largest = _largest_of_blocks(wide) if block else wide.abs().amax(1)
        scales = torch.where(largest > 0, largest / MAX_CODE, 1.0)
        codes = wide.div_(_spread(scales, wide)) if wide is not weight else wide / _spread(scales, wide)
        return cls(codes.clamp_(-MAX_CODE, MAX_CODE).to(torch.float8_e4m3fn), scales)


def _spread(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The scale of each element of `weight` [N, K], in a shape that is multiplied with it."""
    if scales.ndim == 1:
        return scales[:, None]
    rows, columns = weight.shape
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def _largest_of_blocks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    padded = F.pad(weight.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK).amax((1, 3))
