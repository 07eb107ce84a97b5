"""Return freed memory to the system: glibc keeps the memory of large texts otherwise."""

import contextlib
import ctypes


def trim() -> None:
    """Return freed memory, in milliseconds and without the GIL. Do nothing with other allocators."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
