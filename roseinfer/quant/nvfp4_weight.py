"""Weight in NVFP4: codes of four bits (e2m1), a scale for 16 columns of a row, and a factor for the row."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from roseinfer.kernels.common.mxfp4_codes import E2M1_MAGNITUDES, e2m1_numbers
from roseinfer.quant.int4_layouts.nibbles import packed_pairs, unpacked
from roseinfer.quant.nvfp4_scheme import GROUP_COLUMNS

_MAX_MAGNITUDE = E2M1_MAGNITUDES[-1]
# Of a code times a scale.
MAX_NUMBER = _MAX_MAGNITUDE * torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """Matrix code * scale * factor [N, K].

    codes: [N, K / 2] uint8, contiguous; the low four bits are the code of the even column. scales: [N, K / 16] in e4m3.
    factors: [N] float32; rows of one tensor of a checkpoint have the same.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Nvfp4Weight":
        """Round `weight` [N, K] of any float type; 16 divides K. The largest number has the largest code and scale."""
        wide = weight.to(torch.float32).unflatten(1, (-1, GROUP_COLUMNS))
        factor = (wide.abs().max() / MAX_NUMBER).clamp_min(torch.finfo(torch.float32).tiny)
        scales = (wide.abs().amax(2) / (_MAX_MAGNITUDE * factor)).to(torch.float8_e4m3fn)
        steps = scales.to(torch.float32) * factor
        scaled = wide / torch.where(steps > 0, steps, 1.0)[:, :, None]
        middles = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1_MAGNITUDES)], device=weight.device)
        codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
        return cls(packed_pairs(codes.flatten(1)), scales, factor.expand(len(weight)))

    @classmethod
    def stacked(cls, parts: Sequence["Nvfp4Weight"]) -> "Nvfp4Weight":
        """Return the rows of all parts, in their order."""
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat([part.factors for part in parts]),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix itself, each element rounded once: [N, K] of `dtype`."""
        steps = self.scales.to(torch.float32) * self.factors[:, None]
        numbers = e2m1_numbers(unpacked(self.codes)).unflatten(1, (-1, GROUP_COLUMNS))
        return numbers.mul_(steps[:, :, None]).flatten(1).to(dtype)
