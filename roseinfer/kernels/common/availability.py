"""Whether the kernels of this package can run. Importing this module imports none of them."""

from importlib.util import find_spec

import torch


def has_triton(device: torch.device) -> bool:
    """Whether kernels written in Triton run on `device`."""
    return device.type == "cuda" and find_spec("triton") is not None
