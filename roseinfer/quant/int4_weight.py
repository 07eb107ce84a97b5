"""Weight in four bits: codes 0 to 15, and a scale and an offset for each group of columns in a row.

This form is the same for all files and devices. Stacked layers fill it by rows, and a rank of tensor parallelism holds
some of the rows or some of the groups.
"""

from dataclasses import dataclass

import torch

MAX_CODE = 15
DEFAULT_ZERO = 8  # code of the number 0 in weights without offsets
GROUPS = (32, 64, 128)  # group sizes in columns; the fourth is the whole row
# Elements that are rounded at a time, through a copy in float32.
_PART_ELEMENTS = 1 << 25


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Matrix scale * code - offset [N, K].

    codes: [N, K / 2] uint8, contiguous; the low four bits are the code of the even column. scales: [N, K / group],
    float16 or bfloat16. offsets: of the same shape in any float type; None: 8 * scale. The group has 32, 64, 128 or K
    columns.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @classmethod
    def empty(
        cls,
        rows: int,
        columns: int,
        group: int,
        *,
        symmetric: bool = False,
        dtype: torch.dtype = torch.float16,
        device: torch.device | None = None,
    ) -> "Int4Weight":
        """Return a weight without values. dtype: of scales and offsets. `group` has to divide `columns`."""
        assert group in (*GROUPS, columns) and columns % group == 0 and columns % 2 == 0
        scales = torch.empty(rows, columns // group, dtype=dtype, device=device)
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        return cls(codes, scales, None if symmetric else torch.empty_like(scales))

    @classmethod
    def of(cls, weight: torch.Tensor, group: int) -> "Int4Weight":
        """Round `weight` [N, K] of any float type to the nearest codes, with offsets."""
        rows, columns = weight.shape
        result = cls.empty(rows, columns, group, device=weight.device)
        result.round(weight)
        return result

    def part(self, rows: slice) -> "Int4Weight":
        """Return some of the rows, as a view."""
        return Int4Weight(self.codes[rows], self.scales[rows], None if self.offsets is None else self.offsets[rows])

    def columns(self, start: int, width: int) -> "Int4Weight":
        """Return a copy of some of the columns, in whole groups."""
        groups = slice(start // self.group, (start + width) // self.group)
        codes, scales = self.codes[:, start // 2 : (start + width) // 2], self.scales[:, groups]
        offsets = None if self.offsets is None else self.offsets[:, groups].contiguous()
        return Int4Weight(codes.contiguous(), scales.contiguous(), offsets)

    def round(self, weight: torch.Tensor) -> None:
        """Set this weight, which has offsets, to `weight` [N, K]. The codes of a group range from its smallest number
        to its largest.
        """
        assert self.offsets is not None
        rows = max(1, _PART_ELEMENTS // weight.shape[1])
        for start in range(0, len(weight), rows):
            part = self.part(slice(start, start + rows))
            assert part.offsets is not None
            wide = weight[start : start + rows].to(torch.float32).unflatten(1, (-1, self.group))
            least, most = wide.aminmax(dim=2)
            scales = ((most - least) / MAX_CODE).to(self.scales.dtype)
            part.scales.copy_(torch.where(scales > 0, scales, 1.0))
            part.offsets.copy_(-least)
            codes = (wide + part.offsets[:, :, None]).div_(part.scales[:, :, None]).round_().clamp_(0, MAX_CODE)
            low, high = codes.to(torch.uint8).view(len(wide), -1, 2).unbind(2)
            torch.bitwise_or(low, high << 4, out=part.codes)

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix itself, each element rounded once: [N, K] of `dtype`."""
        codes = torch.stack((self.codes & MAX_CODE, self.codes >> 4), 2).view(len(self.codes), -1, self.group)
        scales = self.scales.to(torch.float32)
        offsets = DEFAULT_ZERO * scales if self.offsets is None else self.offsets.to(torch.float32)
        wide = codes.to(torch.float32).mul_(scales[:, :, None]).sub_(offsets[:, :, None])
        return wide.to(dtype).view(self.shape)
