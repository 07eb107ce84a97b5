"""Giving freed memory back to the system: glibc keeps what large texts took, until somebody asks."""

import contextlib
import ctypes


def trim() -> None:
    """Takes milliseconds, without the interpreter's lock. Nothing happens with other allocators."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
