"""Storage of K and V: one tensor for all layers of one shape, so that one indexed copy moves a block of all of them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from roseinfer.attention.pages import fresh_pages
from roseinfer.attention.spec import AttentionSpec
from roseinfer.kernels.common.availability import has_triton
from roseinfer.kernels.common.fp8_codes import CODES

# Bytes of K and V that a scrub processes at a time.
SCRUB_BYTES = 16 << 20


class LayerPlace(NamedTuple):
    """Location of a layer's K and V: in part `part` of the store, as its layer `plane`."""

    part: int
    plane: int


class KVStore:
    """K and V of `num_blocks` blocks of `block_size` tokens, for layers that may differ in KV heads and head size.

    parts: for each shape of K and V among the layers, [num_blocks, layers of it, 2, block_size, kv_heads, head_dim]; a
    model with equal layers has one part. A block's id is its index in every part. The block dimension comes first, so
    that a copy-on-write over all layers reads and writes contiguous memory. places: location of each layer.

    group_of: the KV group of each layer. Layers of one group share block tables and slots (`ForwardBatch.paging`).
    Today one group holds every layer: block ids come from one pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        specs: Sequence[AttentionSpec],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """specs: of the model's layers in order, at least one. dtype: of K and V, the model's dtype or `CODES`."""
        self.dtype = dtype
        self.block_size = block_size
        self.num_blocks = num_blocks
        shapes = list(dict.fromkeys((spec.kv_heads, spec.head_dim) for spec in specs))
        counts = [0] * len(shapes)
        places = []
        for spec in specs:
            part = shapes.index((spec.kv_heads, spec.head_dim))
            places.append(LayerPlace(part, counts[part]))
            counts[part] += 1
        self.places = tuple(places)
        self.group_of = (0,) * len(places)
        self.parts = tuple(
            _zeros((num_blocks, count, 2, block_size, *shape), dtype, device)
            for shape, count in zip(shapes, counts, strict=True)
        )
        # Integers for copies, since PyTorch's indexed operations do not support FP8.
        self._moved = tuple(part.view(torch.uint8) if dtype == CODES else part for part in self.parts)
        self._copy = None
        if has_triton(device):
            from roseinfer.kernels.attention.block_copy import copy_blocks

            self._copy = copy_blocks

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        """The parts as bytes: [num_blocks, bytes of a block in the part] uint8 each, views of the same memory."""
        return tuple(part.view(torch.uint8).view(self.num_blocks, -1) for part in self.parts)

    @property
    def data(self) -> torch.Tensor:
        """The only part of a store with equal layers."""
        (part,) = self.parts
        return part

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one layer's K and V, each [num_blocks, block_size, kv_heads, head_dim] (strided by block)."""
        place = self.places[index]
        part = self.parts[place.part]
        return part[:, place.plane, 0], part[:, place.plane, 1]

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor, tokens: int) -> None:
        """Copy the first `tokens` slots of blocks src[i] -> dst[i] ([n] int64) over all layers in one operation.

        No block is both a source and a destination, and destinations are distinct. tokens: those of the fullest source.
        Copying too many slots of the other blocks is harmless, since slots past a sequence's length are never read.
        Copying whole, partly filled blocks would cost many times the memory traffic.
        """
        for part in self._moved:
            if self._copy is not None:
                self._copy(part, src, dst, tokens)
                continue
            slots = part[:, :, :, :tokens]
            slots.index_copy_(0, dst, slots.index_select(0, src))

    def scrub(self, blocks: torch.Tensor) -> None:
        """Zero all infinities and NaNs in these blocks ([n] int64), in every layer.

        It works in slices of at most 16 MiB: a long request's blocks are gigabytes, and the store leaves little of a
        GPU's memory free.
        """
        for part in self._moved:
            for layer in part.unbind(1):
                for some in blocks.split(max(1, SCRUB_BYTES // layer[0].nbytes)):
                    layer.index_copy_(0, some, _finite(layer.index_select(0, some)))

    @staticmethod
    def bytes_per_block(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
        return sum(2 * block_size * spec.kv_heads * spec.head_dim * dtype.itemsize for spec in specs)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Overwrite infinities and NaNs in `values` with zeros. Bytes are codes, which have no infinities."""
    if values.dtype == torch.uint8:
        return values.masked_fill_((values & 0x7F) == 0x7F, 0)
    return values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU in pages that the kernel fills when they are first used, as a small model may never use
    all.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return fresh_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
