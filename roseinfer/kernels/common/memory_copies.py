"""Copies of memory by copy engines, without kernels.

One driver call (`cuMemcpyBatchAsync`, CUDA 12.8) queues many copies; separate calls would cost the host several
microseconds each.
"""

import ctypes
from enum import IntEnum

import numpy as np


class _AccessOrder(IntEnum):
    """CUmemcpySrcAccessOrder of the driver."""

    STREAM = 1  # sources are read when the stream gets there, not before


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: order of access, hints for the location of source and target (type, id), flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CopyDriver:
    """Queue of many copies on a stream in one call; older drivers get one call per copy."""

    def __init__(self, *, batched: bool = True) -> None:
        """`batched` False: make one call per copy even if the driver takes many."""
        library = ctypes.CDLL("libcuda.so.1")
        self._batch = getattr(library, "cuMemcpyBatchAsync", None) if batched else None
        self._one = library.cuMemcpyAsync
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._one.argtypes = (pointer, pointer, size, pointer)
        if self._batch is not None:
            attributes = ctypes.POINTER(_Attributes)
            places = ctypes.POINTER(size)
            self._batch.argtypes = (pointer, pointer, pointer, size, attributes, places, size, places, pointer)

    def copy(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        """Queue copies. targets, sources: addresses; sizes: bytes; each [n] uint64, contiguous. Raise
        `RuntimeError`.
        """
        if self._batch is None:
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                _check(self._one(target, source, size, stream))
            return
        attributes, first, failed = _Attributes(order=_AccessOrder.STREAM), ctypes.c_size_t(0), ctypes.c_size_t(0)
        lists = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
        _check(self._batch(*lists, len(sizes), attributes, first, 1, failed, stream))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"cannot queue a copy between the GPU and host memory (CUDA driver error {error})")
