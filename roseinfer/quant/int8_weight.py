"""Weight in int8: codes, and a scale for each row (an output channel) that they are multiplied by."""

from dataclasses import dataclass

import torch

MAX_CODE = 127  # -128 is not used: codes are symmetric
_MIN_MAGNITUDE = torch.finfo(torch.float32).tiny  # a 127th part of less may underflow to zero
# Elements that are rounded at a time, through a copy in float32.
PART_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Matrix codes * scales[:, None] [N, K]. codes: [N, K] int8, contiguous. scales: [N] float32, positive."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int) -> "Int8Weight":
        """Return a weight without values, on the CPU."""
        return cls(torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows))

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Int8Weight":
        """Round `weight` [N, K] of any float type to the nearest codes."""
        result = cls.empty(*weight.shape)
        result.round(weight)
        return result

    def part(self, rows: slice) -> "Int8Weight":
        """Return some of the rows, as a view."""
        return Int8Weight(self.codes[rows], self.scales[rows])

    def round(self, weight: torch.Tensor) -> None:
        """Set this weight to `weight` [N, K]. A row's scale is its largest magnitude / 127, or one if it is (almost)
        zero.
        """
        rows = max(1, PART_ELEMENTS // weight.shape[1])
        for wide, codes, scales in zip(
            weight.split(rows), self.codes.split(rows), self.scales.split(rows), strict=True
        ):
            wide = wide.to(torch.float32)
            largest = wide.abs().amax(1)
            scales.copy_(torch.where(largest >= _MIN_MAGNITUDE, largest / MAX_CODE, 1.0))
            codes.copy_((wide / scales[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE))

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix itself, each element rounded once: [N, K] of `dtype`."""
        return (self.codes.to(torch.float32) * self.scales[:, None]).to(dtype)
