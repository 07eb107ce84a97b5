"""K and V of further blocks, or states of further slots, in the memory of the host."""

from typing import Protocol

import torch

from roseinfer.attention.pages import fresh_pages, pinned_pages
from roseinfer.core.errors import ConfigError
from roseinfer.core.memory import available_memory_bytes

GIB = 2**30
# Share of the available memory: taking all of it would get this process killed, or another one.
_MAX_SHARE = 0.9
_ALIGN_BYTES = 4096


class BlockStore(Protocol):
    """Store on the device whose blocks are copied as bytes: `KVStore`, or `StateStore`, whose blocks are its slots."""

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        """The parts as bytes: [num_blocks, bytes of a block in the part] uint8 each, contiguous."""
        ...


class HostStore:
    """`num_blocks` blocks in host memory, byte for byte as in the store that they are copied from and to.

    parts: for each part of that store [num_blocks, bytes of a block in it] uint8, contiguous. One mapping holds all
    parts. It is pinned if the store is on a GPU.
    """

    def __init__(self, num_blocks: int, store: BlockStore) -> None:
        """Allocate the blocks. Raises `ConfigError` if the host lacks the memory."""
        self.num_blocks = num_blocks
        widths = [part.shape[1] for part in store.blocks]
        starts, total = [], 0
        for width in widths:
            starts.append(total)
            total += -(-num_blocks * width // _ALIGN_BYTES) * _ALIGN_BYTES
        check_host_memory(total)
        try:
            memory = pinned_pages(total) if store.blocks[0].is_cuda else fresh_pages(total)
        except OSError as error:
            raise ConfigError(f"the host lacks memory for {total / GIB:.1f} GiB; lower kv_offloading_size") from error
        self._memory = memory  # keeps its pages pinned, whatever views exist
        self.parts = tuple(
            memory[start : start + num_blocks * width].view(num_blocks, width)
            for start, width in zip(starts, widths, strict=True)
        )


def divide_host_memory(
    size_gib: float, block_bytes: int, slots_per_block: float = 0.0, slot_bytes: int = 0
) -> tuple[int, int]:
    """Return the number of KV blocks in so many GiB, and of slots of states: as many for each block as on the device.

    Both are 0 for 0 GiB. Raises `ConfigError` if there is no room for one block.
    """
    blocks = int(size_gib * GIB / (block_bytes + slots_per_block * slot_bytes))
    if size_gib and not blocks:
        raise ConfigError(f"kv_offloading_size is {size_gib:g} GiB, but one KV block takes {block_bytes} bytes")
    return blocks, int(blocks * slots_per_block)


def check_host_memory(num_bytes: int) -> None:
    """Raise `ConfigError` if this is more than the machine can spare, and name what it can."""
    fits = int(_MAX_SHARE * available_memory_bytes())
    if num_bytes > fits:
        raise ConfigError(
            f"kv_offloading_size asks for {num_bytes / GIB:.1f} GiB of host memory, but no more than "
            f"{fits / GIB:.1f} GiB are available; lower it"
        )
