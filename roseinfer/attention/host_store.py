"""K and V of more blocks than the device holds, in the memory of the host."""

from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.pages import fresh_pages, pinned_pages
from roseinfer.core.errors import ConfigError
from roseinfer.core.memory import available_memory_bytes

GIB = 2**30
# Of what is available: taking all of it would end the process, or another one.
_MOST = 0.9
_ALIGN = 4096


class HostStore:
    """`num_blocks` blocks, byte for byte as in the `KVStore` they are copied from and to.

    `parts`: for each part of that store [num_blocks, bytes of a block in it] uint8, contiguous. One mapping holds all
    of them; it is pinned where the store is on a GPU.
    """

    def __init__(self, num_blocks: int, store: KVStore) -> None:
        """Raises `ConfigError` if the host has no memory for it."""
        self.num_blocks = num_blocks
        widths = [part.shape[1] for part in store.blocks]
        starts, total = [], 0
        for width in widths:
            starts.append(total)
            total += -(-num_blocks * width // _ALIGN) * _ALIGN
        check_host_memory(total)
        try:
            memory = pinned_pages(total) if store.blocks[0].is_cuda else fresh_pages(total)
        except OSError as error:
            raise ConfigError(f"there is no memory for {total / GIB:.1f} GiB: lower kv_offloading_size") from error
        self._memory = memory  # its pages are pinned as long as it is there, whatever views are left
        self.parts = tuple(
            memory[start : start + num_blocks * width].view(num_blocks, width)
            for start, width in zip(starts, widths, strict=True)
        )


def num_host_blocks(size_gib: float, bytes_per_block: int) -> int:
    """Blocks that so many GiB hold; 0 for 0. Raises `ConfigError` if it is less than one."""
    blocks = int(size_gib * GIB) // bytes_per_block
    if size_gib and not blocks:
        raise ConfigError(f"kv_offloading_size is {size_gib:g} GiB, but one KV block takes {bytes_per_block} bytes")
    return blocks


def check_host_memory(num_bytes: int) -> None:
    """Raise `ConfigError` if that is more than can be taken of what the machine has available, saying what can."""
    fits = int(_MOST * available_memory_bytes())
    if num_bytes > fits:
        raise ConfigError(
            f"kv_offloading_size asks for {num_bytes / GIB:.1f} GiB of host memory, but no more than "
            f"{fits / GIB:.1f} GiB can be had; lower it"
        )
