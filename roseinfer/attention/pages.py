"""Host memory in pages of its own: allocated when first written, or locked for copies by a GPU."""

import contextlib
import mmap
import os
import weakref
from typing import Any

import torch

from roseinfer.core.errors import ConfigError


def fresh_pages(num_bytes: int, *, forked: bool = True) -> torch.Tensor:
    """Return [num_bytes] uint8 zeros, in pages that the kernel fills when they are first used.

    Zeroing gigabytes that may never be used would take longer than loading a model, and count as used memory. forked:
    forks of this process inherit the pages. They get copies of the pages that a device holds, all of them at once.
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
    """Return `fresh_pages` that are locked in memory, so that a GPU copies from and to them by itself.

    They are unlocked with the tensor, which all its views keep alive. Torch's pinned memory is unsuitable: its
    allocator rounds up to the next power of two. Raises `ConfigError` if the driver refuses.
    """
    pages = fresh_pages(num_bytes, forked=False)
    pages.zero_()  # by all threads; the driver would touch one page after the other
    driver = torch.cuda.cudart()
    error = driver.cudaHostRegister(pages.data_ptr(), num_bytes, 0)
    if int(error):
        with contextlib.suppress(RuntimeError):  # a retry with less memory must not see this error again
            torch.zeros(1, device="cuda").add_(1)
        raise ConfigError(
            f"the GPU's driver could not lock {num_bytes / 2**30:.1f} GiB of host memory (CUDA error {int(error)}: "
            f"{driver.cudaGetErrorString(error)}); lower kv_offloading_size"
        )
    # Runs before the pages are freed: the finalizer does not hold the tensor.
    weakref.finalize(pages, _unlock, driver, pages.data_ptr(), os.getpid()).atexit = False
    return pages


def _unlock(driver: Any, address: int, owner: int) -> None:
    """Unlock the pages, except in a fork of the process `owner`, which has neither the pages nor the driver's lock."""
    if os.getpid() == owner:
        driver.cudaHostUnregister(address)
