"""Peak rates of a device, measured quickly: bytes moved and matrix arithmetic per second."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from roseinfer.runner.timing import device_seconds

REPEATS = 7
# Uncounted runs: an idle GPU takes a while to raise its clocks.
WARM_UP_RUNS = {"cuda": 50, "cpu": 2}
COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
MATRIX_DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True, slots=True)
class Limits:
    """Peak rates. bytes_s: read and written by a copy. flops_s: product of large square matrices, in bf16 on a GPU."""

    bytes_s: float
    flops_s: float


@torch.inference_mode()
def measure_limits(device: torch.device, bytes_s: float | None = None, flops_s: float | None = None) -> Limits:
    """Return medians of a few runs; given values are not measured. GPU memory is freed at the end."""
    limits = Limits(bytes_s or _copy_rate(device), flops_s or _product_rate(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return limits


def _copy_rate(device: torch.device) -> float:
    size = COPY_BYTES[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def _product_rate(device: torch.device) -> float:
    """Multiply random numbers, since a GPU multiplies zeros faster."""
    size = MATRIX_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(MATRIX_DTYPE[device.type]) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: left @ right, device)


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of single runs."""
    for _ in range(WARM_UP_RUNS[device.type]):
        work()
    timed = device_seconds if device.type == "cuda" else _timed
    return median(timed(work) for _ in range(REPEATS))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
