"""Matrix products of FP8 rows and FP8 weights: few rows by our own kernel (`fp8_tiles`), more by cuBLASLt.

With block scales, sums are float32. With channel scales they have the matrix units' own precision of some 14 bits. On
an H200 that adds an error of 0.13% (4,096 columns) to 0.26% (12,288), against 2.6% from rounding the rows; exact sums
take 15% longer. On a CPU products are right, but slow.
"""

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.common.triton_support import cdiv
from roseinfer.kernels.linear.fp8_rows import Fp8Rows
from roseinfer.kernels.linear.fp8_tile_configs import TileConfig, choose_tile_config
from roseinfer.kernels.linear.fp8_tiles import Parts, tile_product

# Both sizes of a weight have to be multiples of this.
MULTIPLE_COLUMNS = 16
# cuBLASLt reads the scales of a block's rows at strides of a multiple of so many blocks of columns.
_STRIDE_COLUMNS = 4


class Fp8Factor:
    """Weight codes [N, K] as the right side of products: x -> x @ (codes * scales).T.

    scales: float32, [N] (channel; for rows with one scale) or [ceil(N / 128), K / 128] (block; for rows with a scale
    for each group). N and K are multiples of 16, and K of a block weight is a multiple of 128. Block scales need
    compute capability 9.0, channel scales 9.0 or higher. parts: workspace for all products of a stream.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, parts: Parts) -> None:
        self.grouped = scales.ndim == 2
        self.codes = codes
        self._scales = scales
        self._transposed = codes.t()
        self._library_scales = _spaced(scales) if self.grouped else scales[None, :]
        self._configs: dict[int, TileConfig | None] = {}
        self._parts = parts

    def __call__(
        self,
        x: Fp8Rows,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ (codes * scales).T + bias + residual [x.rows, N].

        All but x are of `dtype` (bfloat16 or float16). bias: [N]. residual: [x.rows, N], is overwritten and returned.
        """
        config = self._config(x.rows)
        if config is not None:
            return tile_product(
                x, self.codes, self._scales, config, self._parts, dtype=dtype, bias=bias, residual=residual
            )
        result = self.by_library(x, dtype, bias)
        return result if residual is None else residual.add_(result)

    def _config(self, rows: int) -> TileConfig | None:
        if rows not in self._configs:
            self._configs[rows] = choose_tile_config(rows, *self.codes.shape, blocks=self.grouped)
        return self._configs[rows]

    def by_library(self, x: Fp8Rows, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ (codes * scales).T + bias [x.rows, N] of `dtype`, by cuBLASLt, for any number of rows."""
        if self.grouped:
            result = self._by_blocks(x, dtype)[: x.rows]
            return result if bias is None else result.add_(bias)
        result = torch._scaled_mm(
            x.codes, self._transposed, x.scales, self._library_scales, bias, out_dtype=dtype, use_fast_accum=True
        )
        return result[: x.rows]

    def _by_blocks(self, x: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
        """Multiply all rows that x has memory for."""
        if not x.codes.is_cuda:
            return self._by_blocks_on_cpu(x, dtype)
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        return F.scaled_mm(
            x.codes, self._transposed, x.scales, kinds[0], self._library_scales, kinds[1], output_dtype=dtype
        )

    def _by_blocks_on_cpu(self, x: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
        """Multiply one group of columns after another."""
        wide, rows = x.widen(), self.codes.shape[0]
        result = torch.zeros((x.rows, rows), dtype=torch.float32)
        for group, columns in enumerate(wide.split(SCALE_BLOCK, 1)):
            codes = self.codes[:, group * SCALE_BLOCK : (group + 1) * SCALE_BLOCK].float()
            scales = self._library_scales[group].repeat_interleave(SCALE_BLOCK)[:rows]
            result += (columns @ codes.t()) * scales
        return result.to(dtype)


def _spaced(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as [K / 128 rounded up to a multiple of four, N / 128], the first dimension contiguous."""
    rows, columns = scales.shape
    spaced = scales.new_zeros((rows, cdiv(columns, _STRIDE_COLUMNS) * _STRIDE_COLUMNS))
    spaced[:, :columns] = scales
    return spaced.t()
