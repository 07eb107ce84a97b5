"""A weight in int8: codes, and a scale for each row (an output channel) that they are multiplied by."""

from dataclasses import dataclass

import torch

MAX_CODE = 127  # -128 is not used: codes are symmetric
_LEAST = torch.finfo(torch.float32).tiny  # a part of less may be no number above zero any more
# Elements that are rounded at a time. What lies between is a copy in float32.
_PART = 1 << 22


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """The matrix codes * scales[:, None] [N, K]. codes: [N, K] int8, contiguous. scales: [N] float32, positive."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int) -> "Int8Weight":
        """Without values, on the CPU."""
        return cls(torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows))

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Int8Weight":
        """`weight` [N, K] of any float type, rounded to the nearest code."""
        result = cls.empty(*weight.shape)
        result.round(weight)
        return result

    def part(self, rows: slice) -> "Int8Weight":
        """Some of the rows: a view."""
        return Int8Weight(self.codes[rows], self.scales[rows])

    def round(self, weight: torch.Tensor) -> None:
        """Become `weight` [N, K]. A row's scale is its largest magnitude / 127; one of (almost) zeros is one."""
        rows = max(1, _PART // weight.shape[1])
        for wide, codes, scales in zip(
            weight.split(rows), self.codes.split(rows), self.scales.split(rows), strict=True
        ):
            wide = wide.to(torch.float32)
            largest = wide.abs().amax(1)
            scales.copy_(torch.where(largest >= _LEAST, largest / MAX_CODE, 1.0))
            codes.copy_((wide / scales[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE))

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix itself, each element rounded once: [N, K] of `dtype`."""
        return (self.codes.to(torch.float32) * self.scales[:, None]).to(dtype)
