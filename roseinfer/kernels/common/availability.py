"""Facts about a device that choose kernels. Importing this module imports none."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from roseinfer.core.errors import ResourceError
from roseinfer.core.support import LARGE_STEPS


def has_triton(device: torch.device) -> bool:
    """Return True if Triton kernels run on `device`. Raise `ResourceError` if Triton is installed and does not work."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    _import_triton()
    return True


@cache
def _import_triton() -> None:
    try:
        import_module("triton")
    except ImportError as error:
        repair = "reinstall it, or uninstall it to run without its kernels"
        raise ResourceError(f"the triton package is installed and cannot be imported: {repair} ({error})") from error


def has_large_steps(device: torch.device) -> bool:
    """Return True if `device` runs the kernels for large steps."""
    return device.type == "cuda" and LARGE_STEPS.runs_on(torch.cuda.get_device_capability(device))


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
