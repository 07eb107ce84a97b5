"""Settings of the libraries behind PyTorch on a CPU, which they read from the environment when they first work.

Only entry points call this, before torch is imported. What a user has set stays.
"""

import os

# How often an OpenMP thread looks before it sleeps, at the barrier behind each parallel loop. GNU's default spins for
# milliseconds: with another busy process on the cores the same decoding took 3 to 24 s that takes 0.7 s this way.
# Sleeping at once (OMP_WAIT_POLICY=passive) costs up to a fifth of the speed on quiet cores.
OPENMP_SPINS = "1000"

# Products of packed weights have a kernel for each weight shape and number of rows, kept by oneDNN ("primitive cache")
# and again by PyTorch's wrapper of it, ideep (an LRU of its own, per thread); both keep 1,024 by default. With about
# five shapes a model that is every number of rows of two hundred, and the memory that making the kernels scatters over
# the heap is several times what they hold: four shapes of GPT-2 took 0.8 GB more after 700 numbers of rows with room
# for 256 kernels, 0.27 GB with 64. Making one takes 0.3 to 0.6 ms; 64 are the kernels of a dozen numbers of rows.
KEPT_KERNELS = "64"


def prepare_cpu_libraries() -> None:
    """Call before torch is first imported: threads wait calmly, and few kernels are kept."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
    if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ:  # oneDNN's older name for it
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT_KERNELS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", KEPT_KERNELS)
