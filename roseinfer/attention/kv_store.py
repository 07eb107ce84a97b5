"""Storage of K and V: one tensor for all layers of one KV group and shape, so that one indexed copy moves a block of
all of them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from roseinfer.attention.groups import KVGroups
from roseinfer.attention.pages import fresh_pages
from roseinfer.attention.spec import AttentionSpec
from roseinfer.kernels.common.availability import has_triton
from roseinfer.kernels.common.fp8_codes import CODES


class LayerPlace(NamedTuple):
    """Location of a layer's K and V: in part `part` of the store, as its layer `plane`."""

    part: int
    plane: int


class KVStore:
    """K and V in blocks of `block_size` tokens, for layers that may differ in KV heads, head size and KV group.

    parts: for each group and shape of K and V among its layers, [blocks of the group, layers of it, 2, block_size,
    kv_heads, head_dim]; a model with equal layers has one part. A block's id is its index in every part of its group.
    The block dimension comes first, so that a copy-on-write over all layers reads and writes contiguous memory. places:
    location of each layer.

    group_of: the KV group of each layer. Layers of one group share block tables and slots (`ForwardBatch.paging`).
    num_blocks: of the first group.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        specs: Sequence[AttentionSpec],
        dtype: torch.dtype,
        device: torch.device,
        groups: KVGroups | None = None,
        window_blocks: Sequence[int] = (),
    ) -> None:
        """specs: of the model's layers in order, at least one. dtype: of K and V, the model's dtype or `CODES`.

        groups: None for one group. window_blocks: blocks of each group after the first.
        """
        self.dtype = dtype
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.group_of = (groups or KVGroups.single(len(specs))).group_of
        blocks = (num_blocks, *window_blocks)
        kinds = [(group, spec.kv_heads, spec.head_dim) for group, spec in zip(self.group_of, specs, strict=True)]
        counts = dict.fromkeys(kinds, 0)
        places = []
        for kind in kinds:
            places.append(LayerPlace(list(counts).index(kind), counts[kind]))
            counts[kind] += 1
        self.places = tuple(places)
        self.parts = tuple(
            _zeros((blocks[group], count, 2, block_size, *shape), dtype, device)
            for (group, *shape), count in counts.items()
        )
        self._parts_of = tuple(
            tuple(part for part, (number, *_) in enumerate(counts) if number == group) for group in range(len(blocks))
        )
        # Integers for copies, since PyTorch's indexed operations do not support FP8.
        self._moved = tuple(part.view(torch.uint8) if dtype == CODES else part for part in self.parts)
        self._copy = None
        if has_triton(device):
            from roseinfer.kernels.attention.block_copy import copy_blocks

            self._copy = copy_blocks

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        """Parts of the first group as bytes: [num_blocks, bytes of a block in the part] uint8 each, views of the same
        memory.
        """
        return tuple(self.parts[part].view(torch.uint8).view(self.num_blocks, -1) for part in self._parts_of[0])

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

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor, tokens: int, group: int = 0) -> None:
        """Copy the first `tokens` slots of a group's blocks src[i] -> dst[i] ([n] int64) over all its layers at once.

        No block is both a source and a destination, and destinations are distinct. tokens: those of the fullest source.
        Copying too many slots of the other blocks is harmless, since slots past a sequence's length are never read.
        Copying whole, partly filled blocks would cost many times the memory traffic.
        """
        for part in self._moved_of(group):
            if self._copy is not None:
                self._copy(part, src, dst, tokens)
                continue
            slots = part[:, :, :, :tokens]
            slots.index_copy_(0, dst, slots.index_select(0, src))

    def _moved_of(self, group: int) -> Iterator[torch.Tensor]:
        return (self._moved[part] for part in self._parts_of[group])

    @staticmethod
    def bytes_per_block(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a block in all layers of these specs."""
        return sum(2 * block_size * spec.kv_heads * spec.head_dim * dtype.itemsize for spec in specs)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU in pages that the kernel fills when they are first used, as a small model may never use
    all.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return fresh_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
