"""Check for the kernels of this package. Importing this module imports none of them."""

from importlib.util import find_spec

import torch


def has_triton(device: torch.device) -> bool:
    """Return True if Triton kernels run on `device`."""
    return device.type == "cuda" and find_spec("triton") is not None
