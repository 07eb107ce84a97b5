"""Compile kernels for a Hopper GPU, without having one, by forks of this process; print the outcome."""

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from roseinfer.kernels.common.compile_ahead import compiling


class NoGpu:
    """Driver that describes a GPU, and cannot launch."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@triton.jit
def double(x, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(x + place, tl.load(x + place) * 2)


@triton.jit
def wrong(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.zeros([2 * SIZE], tl.float32))


def main() -> None:
    driver.set_active(NoGpu())
    x = torch.ones(64)
    hits = []
    triton.knobs.compilation.listener = lambda src, cache_hit, **_: hits.append((src.name, cache_hit))
    with compiling(2) as ahead:
        for size in (16, 32, 16):
            double[(1,)](x, SIZE=size)
        wrong[(1,)](x, SIZE=16)
    try:
        wrong[(1,)](x, SIZE=16)
        failed = False
    except triton.CompilationError:
        failed = True
    print(ahead, len(double.device_caches[0][0]), failed, x.sum().item())
    # What a fork has compiled, this process only takes from the cache.
    print(sorted(hits))
