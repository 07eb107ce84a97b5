"""Matrix products of FP8 rows and FP8 weights by cuBLASLt.

With block scales sums are float32. With channel scales they are kept in the matrix units' own precision, some 14 bits:
on an H200 that adds 0.13% to results that rounding the rows to FP8 has changed by 2.6%, and exact sums take 15% longer.
On a CPU products are right, and slow.
"""

import torch
import torch.nn.functional as F

from roseinfer.kernels.fp8_rows import GROUP, Fp8Rows
from roseinfer.kernels.triton_support import cdiv

# What both sizes of a weight have to be multiples of.
MULTIPLE = 16
# cuBLASLt reads the scales of a block's rows from places so many blocks of columns apart.
_BLOCK_COLUMNS = 4


class Fp8Factor:
    """A weight codes [N, K] as the right side of products: x -> x @ (codes * scales).T.

    scales: float32, [N] (channel; taken with rows of one scale) or [ceil(N / 128), K / 128] (block; with those of a
    scale for each group). N and K are multiples of 16, K of a block weight one of 128. Block scales need compute
    capability 9.0, channel scales that or higher.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.grouped = scales.ndim == 2
        self.codes = codes
        self._transposed = codes.t()
        self._scales = _spaced(scales) if self.grouped else scales[None, :]

    def __call__(self, x: Fp8Rows, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[x.rows, N] of `dtype` (bfloat16 or float16). bias: [N], of `dtype`."""
        if self.grouped:
            result = self._by_blocks(x, dtype)
            return result if bias is None else result.add_(bias)
        return torch._scaled_mm(
            x.codes, self._transposed, x.scales, self._scales, bias, out_dtype=dtype, use_fast_accum=True
        )

    def _by_blocks(self, x: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
        if not x.codes.is_cuda:
            return self._by_blocks_on_cpu(x, dtype)
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        result = F.scaled_mm(x.codes, self._transposed, x.scales, kinds[0], self._scales, kinds[1], output_dtype=dtype)
        return result[: x.rows]

    def _by_blocks_on_cpu(self, x: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
        """A group of columns after the other."""
        wide, rows = x.widen(), self.codes.shape[0]
        result = torch.zeros((x.rows, rows), dtype=torch.float32)
        for group, columns in enumerate(wide.split(GROUP, 1)):
            codes = self.codes[:, group * GROUP : (group + 1) * GROUP].float()
            scales = self._scales[group].repeat_interleave(GROUP)[:rows]
            result += (columns @ codes.t()) * scales
        return result.to(dtype)


def _spaced(scales: torch.Tensor) -> torch.Tensor:
    """[K / 128 rounded up to a multiple of four, N / 128], the first dimension contiguous."""
    rows, columns = scales.shape
    spaced = scales.new_zeros((rows, cdiv(columns, _BLOCK_COLUMNS) * _BLOCK_COLUMNS))
    spaced[:, :columns] = scales
    return spaced.t()
