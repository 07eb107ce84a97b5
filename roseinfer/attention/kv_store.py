"""Where K and V live: one tensor for all layers, so that one indexed copy moves a block of every layer."""

import math
import mmap

import torch

from roseinfer.kernels.availability import has_triton


class KVStore:
    """`data`: [num_blocks, num_layers, 2, block_size, kv_heads, head_dim].

    The block index comes first so that a copy-on-write over all layers reads and writes contiguous memory.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, num_layers, 2, block_size, kv_heads, head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.data = _zeros(shape, dtype, device)
        self._copy = None
        if has_triton(device):
            from roseinfer.kernels.block_copy import copy_blocks

            self._copy = copy_blocks

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's K and V, each [num_blocks, block_size, kv_heads, head_dim] (strided by block)."""
        return self.data[:, index, 0], self.data[:, index, 1]

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor, tokens: int) -> None:
        """Copy the first `tokens` slots of blocks src[i] -> dst[i] ([n] int64) over all layers in one operation.

        No block is both a source and a destination, and destinations are distinct. `tokens` is that of the
        fullest source: to copy more of the others is harmless, since nothing past a sequence's length is ever read,
        but to copy whole blocks that are filled in part takes memory traffic many times over.
        """
        if self._copy is not None:
            self._copy(self.data, src, dst, tokens)
            return
        slots = self.data[:, :, :, :tokens]
        slots.index_copy_(0, dst, slots.index_select(0, src))

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return num_layers * 2 * block_size * kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in pages that the kernel fills in when they are first used.

    Zeroing gigabytes that a small model may never fill would take longer than loading it, and count as used memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < mmap.PAGESIZE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    # The tensor keeps the mapping alive.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
