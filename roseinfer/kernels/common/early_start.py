"""Kernels that start before their predecessor ends (programmatic dependent launch, CUDA programming guide).

Between two kernels of a stream the GPU drains, flushes and launches, which takes about a microsecond. A step of small
kernels has hundreds of such gaps. A kernel launched with `options(device)` starts during them. All of its threads then
wait (`gdc_wait`), at once or after reading older data, until all earlier kernels are done and their results visible.

Weights, a step's inputs and its plan are older than any such kernel: they are written before the step's embedding,
whose kernel is launched normally and so begins and ends alone.

A kernel before a product lets the product start at once (`gdc_launch_dependents`), so that it can read its weight,
which depends on no kernel. Every such kernel waits for its predecessor, and so for all earlier ones, before it reads or
writes anything else.
"""

from functools import cache
from typing import Any

import torch

_OFF = {"OVERLAP": False}
_ON = {"OVERLAP": True, "launch_pdl": True}


def options(device: torch.device) -> dict[str, Any]:
    """Return launch options for a kernel with a constant `OVERLAP` that begins by waiting."""
    return _ON if capable(device) else _OFF


def capable(device: torch.device) -> bool:
    """Return True if kernels on this device can start early."""
    return device.type == "cuda" and _capable(device.index or 0)


@cache
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)
