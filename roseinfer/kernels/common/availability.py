"""Facts about a device that choose kernels. Importing this module imports none."""

from functools import cache
from importlib.util import find_spec

import torch


def has_triton(device: torch.device) -> bool:
    """Return True if Triton kernels run on `device`."""
    return device.type == "cuda" and find_spec("triton") is not None


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return _multiprocessors(device.index or 0)


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
