"""Kernels that start while their predecessor ends (programmatic dependent launch, CUDA programming guide).

Between two kernels of a stream the GPU drains, flushes and launches, about a microsecond; a step of small kernels has
hundreds of such gaps. A kernel launched with `options(device)` is brought up meanwhile and waits (`gdc_wait`, in all of
its threads, at first or after reading what is older) until all before it is done and visible.

Older than any such kernel are weights, and what a step's inputs and plan hold: they are written before its embedding,
which is looked up by a kernel that is not launched so, and so begins and ends alone.

A kernel before a product lets that start at once (`gdc_launch_dependents`), so that it can read its weight, which
depends on nothing. All that is launched so waits for its predecessor, and thereby for all before that, before it reads
or writes anything else.
"""

from functools import cache
from typing import Any

import torch

_OFF = {"OVERLAP": False}
_ON = {"OVERLAP": True, "launch_pdl": True}


def options(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel with a constant `OVERLAP` that begins by waiting."""
    return _ON if capable(device) else _OFF


def capable(device: torch.device) -> bool:
    """Whether kernels can start early there."""
    return device.type == "cuda" and _capable(device.index or 0)


@cache
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)
