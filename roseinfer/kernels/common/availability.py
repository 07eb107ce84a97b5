"""Facts about a device that choose kernels. Importing this module imports none."""

from functools import cache
from importlib.util import find_spec

import torch

from roseinfer.core.support import LARGE_STEPS


def has_triton(device: torch.device) -> bool:
    """Return True if Triton kernels run on `device`."""
    return device.type == "cuda" and find_spec("triton") is not None


def has_large_steps(device: torch.device) -> bool:
    """Return True if `device` runs the kernels for large steps."""
    return device.type == "cuda" and LARGE_STEPS.runs_on(torch.cuda.get_device_capability(device))


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
