"""Products of many rows by a weight in four bits: kernels that widen it, or the library by a copy in 16 bits.

The copy is made in parts, so that it needs little memory.
"""

from typing import NamedTuple

import torch

from roseinfer.kernels.common.triton_support import cdiv
from roseinfer.kernels.linear.fp8_tile_configs import TileConfig
from roseinfer.kernels.linear.fp8_tiles import Parts
from roseinfer.kernels.linear.int4_bulk import bulk_supports, int4_bulk_product
from roseinfer.kernels.linear.int4_bulk_configs import BulkConfig, choose_bulk_config
from roseinfer.kernels.linear.int4_codes import PackedInt4
from roseinfer.kernels.linear.int4_tile_configs import choose_int4_tile_config
from roseinfer.kernels.linear.int4_tiles import int4_tile_product, widen

# Elements of a copy in 16 bits, and what divides the number of its rows. Smaller copies are slower: a layer of Qwen3-8B
# takes 1,131 us at 2,048 rows with 8M elements, 1,095 with 16M, 1,084 with 32M and 1,076 with 128M (bfloat16: 995).
_MAX_COPY_ELEMENTS, _MULTIPLE_ROWS = 1 << 25, 128


class Int4Workspace(NamedTuple):
    """Memory that all products of a stream share: only one of them at a time writes there."""

    parts: Parts
    copy: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device) -> "Int4Workspace":
        return cls(Parts.allocate(device), torch.empty(_MAX_COPY_ELEMENTS, dtype=torch.int16, device=device))


class Int4Factor:
    """Weight [N, K] as the right side of products: x -> x @ weight.T, for x in 16 bits."""

    def __init__(self, weight: PackedInt4, workspace: Int4Workspace) -> None:
        self.weight = weight
        self._workspace = workspace
        self._choose = choose_bulk_config if bulk_supports(weight) else choose_int4_tile_config
        self._configs: dict[int, BulkConfig | TileConfig | None] = {}

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias + residual [M, N]. bias: [N]. residual: [M, N], is overwritten and returned."""
        x = x.contiguous()
        config = self._config(len(x))
        if config is None:
            return self.by_library(x, bias, residual)
        if isinstance(config, BulkConfig):
            return int4_bulk_product(x, self.weight, config, self._workspace.parts, bias=bias, residual=residual)
        return int4_tile_product(x, self.weight, config, self._workspace.parts, bias=bias, residual=residual)

    def _config(self, rows: int) -> BulkConfig | TileConfig | None:
        if rows not in self._configs:
            self._configs[rows] = self._choose(rows, *self.weight.shape)
        return self._configs[rows]

    def by_library(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Do as `__call__` for any number of rows, by copies of parts of the weight."""
        outs, columns = self.weight.shape
        result = torch.empty((len(x), outs), dtype=x.dtype, device=x.device) if residual is None else residual
        largest = _MAX_COPY_ELEMENTS // columns // _MULTIPLE_ROWS * _MULTIPLE_ROWS
        assert largest > 0, "a few rows of the weight fill the workspace"
        step = cdiv(cdiv(outs, cdiv(outs, largest)), _MULTIPLE_ROWS) * _MULTIPLE_ROWS
        for start in range(0, outs, step):
            rows = slice(start, min(start + step, outs))
            part = self._workspace.copy.view(x.dtype)[: (rows.stop - start) * columns].view(-1, columns)
            widen(self.weight, rows, part)
            if residual is None:
                torch.mm(x, part.t(), out=result[:, rows])
            else:
                result[:, rows].addmm_(x, part.t())
        return result if bias is None else result.add_(bias)
