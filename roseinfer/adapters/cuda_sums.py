"""Sums of adapters in steps of many rows on a GPU, computed beside the products that they belong to."""

import torch

from roseinfer.adapters.step import StepAdapters
from roseinfer.kernels.common.side_stream import SideStream
from roseinfer.kernels.linear.fp8_rows import Fp8Rows
from roseinfer.kernels.lora.shrink_tiles import MAX_SHARED_TILES, TileSums, shrink_tiles
from roseinfer.kernels.lora.slots import SlotMatrices

# Captured steps of up to so many tokens compute sums beside the product, which mostly reads its weight. Two streams
# would take the host too long in other steps.
_MAX_BESIDE_TOKENS = 1024


class AdapterSums:
    """Inputs of a model's products times A of each row's adapter, in steps of many rows."""

    def __init__(self, step: StepAdapters, device: torch.device) -> None:
        self._step = step
        self._arrived = torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)
        self._side = SideStream(device)

    def ready(self) -> None:
        """Let the next `of` run beside all that is launched between this call and that one."""
        if self._is_beside():
            self._side.follow()

    def of(self, inputs: torch.Tensor | Fp8Rows, matrices: SlotMatrices) -> TileSums:
        """Return inputs [T, in], which were launched before `ready`, times A."""
        rows = self._step.rows
        assert rows is not None
        if not self._is_beside():
            return shrink_tiles(inputs, rows.of_tokens, matrices, self._arrived)
        with self._side.launch():
            sums = shrink_tiles(inputs, rows.of_tokens, matrices, self._arrived)
        self._side.join()
        return sums

    def _is_beside(self) -> bool:
        rows = self._step.rows
        if rows is None or not rows.of_tokens.is_cuda or len(rows.of_tokens) > _MAX_BESIDE_TOKENS:
            return False
        return torch.cuda.is_current_stream_capturing()
