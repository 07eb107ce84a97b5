"""Memory of the host in pages of its own: given when first written, or locked for a GPU to copy from and to."""

import contextlib
import mmap
import os
import weakref
from typing import Any

import torch

from roseinfer.core.errors import ConfigError


def fresh_pages(num_bytes: int, *, forked: bool = True) -> torch.Tensor:
    """[num_bytes] uint8, zeros, in pages that the kernel fills in when they are first used.

    Zeroing gigabytes that may never be used would take longer than loading a model, and count as used memory.
    forked: a fork of this process has them too. It gets a copy of pages that a device holds, all of them at once.
    Raises `OSError` if the address space has no room.
    """
    if num_bytes < mmap.PAGESIZE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    # The tensor keeps the mapping alive.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    if not forked and hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8)


def pinned_pages(num_bytes: int) -> torch.Tensor:
    """`fresh_pages` that stay where they are, so that a GPU copies from and to them by itself.

    They are let go with the tensor: whoever has views of it keeps it. Not torch's pinned memory, whose allocator takes
    the next power of two. Raises `ConfigError` if the driver refuses.
    """
    pages = fresh_pages(num_bytes, forked=False)
    pages.zero_()  # by all threads; the driver would ask for one page after the other
    driver = torch.cuda.cudart()
    error = driver.cudaHostRegister(pages.data_ptr(), num_bytes, 0)
    if int(error):
        with contextlib.suppress(RuntimeError):  # who tries again with less shall not be told of this error once more
            torch.zeros(1, device="cuda").add_(1)
        raise ConfigError(
            f"the GPU's driver could not lock {num_bytes / 2**30:.1f} GiB of host memory (CUDA error {int(error)}: "
            f"{driver.cudaGetErrorString(error)}); lower kv_offloading_size"
        )
    # Before the pages themselves go: what is kept here does not keep the tensor.
    weakref.finalize(pages, _unlock, driver, pages.data_ptr(), os.getpid()).atexit = False
    return pages


def _unlock(driver: Any, address: int, owner: int) -> None:
    """A fork of the process `owner` has neither the pages nor the driver's word on them."""
    if os.getpid() == owner:
        driver.cudaHostUnregister(address)
