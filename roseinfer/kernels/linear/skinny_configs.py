"""How `skinny_linear` cuts its work, by shape: measured where a shape was measured, else by rule."""

from dataclasses import dataclass

from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How the work is cut. It decides speed, and the order of a sum's terms.

    block_n: outputs a program computes (of gate and up each, when gated). block_k: columns it takes at a time, a power
    of two, at least 16 * warps. dot: multiply on the tensor cores, else elementwise in float32. stages: depth of the
    software pipeline over blocks of columns (1: none). preload: read the first block of columns into registers before
    waiting for the input. prefetch: columns of every weight row asked into the L2 cache before waiting; `preload` and
    `prefetch` gain with `overlap` only. evict_first: mark the weight as the first to leave the L2 cache.
    """

    block_n: int
    block_k: int
    dot: bool
    warps: int = 4
    stages: int = 3
    preload: bool = True
    prefetch: int = 0
    evict_first: bool = False


# About two programs for each multiprocessor of an H200.
LEAST_PROGRAMS = 256

# (bucket of rows, weight rows, columns, gated)
Shape = tuple[int, int, int, bool]

# Fastest on an H200 (torch 2.11, CUDA 13.0, Triton 3.6; 2026-11-21), with `overlap`, in a chain of all layers; None
# where cuBLAS is faster though what is fused here takes kernels of its own there. GPT-2's head is padded.
MEASURED: dict[Shape, SkinnyConfig | None] = {
    # GPT-2 (124M)
    (1, 2304, 768, False): SkinnyConfig(4, 1024, False, 2, 1, True, 0, True),  # 2.4 us, cuBLAS 4.3
    (2, 2304, 768, False): SkinnyConfig(16, 1024, True, 4, 1, True, 0, False),  # 2.7 us, cuBLAS 4.3
    (4, 2304, 768, False): SkinnyConfig(16, 1024, True, 8, 1, True, 0, False),  # 3.3 us, cuBLAS 4.3
    (8, 2304, 768, False): SkinnyConfig(8, 1024, True, 4, 1, True, 0, False),  # 4.1 us, cuBLAS 4.3
    (16, 2304, 768, False): SkinnyConfig(16, 1024, True, 4, 1, True, 0, False),  # 5.7 us, cuBLAS 4.4
    (1, 768, 768, False): SkinnyConfig(4, 1024, False, 4, 1, True, 768, False),  # 1.1 us, cuBLAS 4.3
    (2, 768, 768, False): SkinnyConfig(8, 1024, True, 4, 1, True, 0, False),  # 1.5 us, cuBLAS 4.0
    (4, 768, 768, False): SkinnyConfig(8, 1024, True, 4, 1, True, 0, False),  # 1.5 us, cuBLAS 4.2
    (8, 768, 768, False): SkinnyConfig(8, 1024, True, 4, 1, True, 0, False),  # 2.1 us, cuBLAS 4.2
    (16, 768, 768, False): SkinnyConfig(8, 1024, True, 4, 1, True, 768, False),  # 3.2 us, cuBLAS 4.0
    (1, 3072, 768, False): SkinnyConfig(16, 1024, True, 4, 1, True, 768, False),  # 2.6 us, cuBLAS 4.5
    (2, 3072, 768, False): SkinnyConfig(16, 1024, True, 4, 1, True, 0, False),  # 2.8 us, cuBLAS 4.5
    (4, 3072, 768, False): SkinnyConfig(16, 1024, True, 4, 1, True, 0, False),  # 3.6 us, cuBLAS 4.5
    (8, 3072, 768, False): SkinnyConfig(16, 1024, True, 4, 1, True, 0, False),  # 4.4 us, cuBLAS 4.6
    (16, 3072, 768, False): SkinnyConfig(16, 1024, True, 4, 1, True, 0, False),  # 6.1 us, cuBLAS 4.6
    (1, 768, 3072, False): SkinnyConfig(2, 4096, False, 4, 1, True, 0, False),  # 2.0 us, cuBLAS 7.6
    (2, 768, 3072, False): SkinnyConfig(2, 4096, False, 8, 1, True, 0, False),  # 2.7 us, cuBLAS 7.5
    (4, 768, 3072, False): SkinnyConfig(2, 4096, False, 8, 1, True, 0, False),  # 3.5 us, cuBLAS 7.6
    (8, 768, 3072, False): SkinnyConfig(2, 4096, False, 4, 1, True, 0, False),  # 4.6 us, cuBLAS 7.6
    (16, 768, 3072, False): SkinnyConfig(8, 1024, True, 4, 2, True, 3072, False),  # 4.9 us, cuBLAS 7.7
    (1, 50304, 768, False): SkinnyConfig(16, 1024, False, 4, 1, True, 0, True),  # 19.7 us, cuBLAS 29.0
    (2, 50304, 768, False): SkinnyConfig(32, 256, True, 2, 3, True, 768, False),  # 23.4 us, cuBLAS 36.1
    (4, 50304, 768, False): SkinnyConfig(32, 256, True, 4, 3, True, 768, False),  # 25.0 us, cuBLAS 55.6
    (8, 50304, 768, False): SkinnyConfig(32, 256, True, 4, 3, True, 768, False),  # 28.6 us, cuBLAS 106.6
    (16, 50304, 768, False): SkinnyConfig(64, 256, True, 4, 3, True, 0, False),  # 39.8 us, cuBLAS 102.0
    # Qwen3-0.6B
    (1, 4096, 1024, False): SkinnyConfig(8, 1024, False, 2, 1, True, 1024, False),  # 2.8 us, cuBLAS 5.2
    (2, 4096, 1024, False): SkinnyConfig(16, 1024, True, 8, 1, True, 0, False),  # 3.4 us, cuBLAS 5.2
    (4, 4096, 1024, False): SkinnyConfig(16, 1024, True, 4, 1, True, 0, False),  # 3.6 us, cuBLAS 5.2
    (8, 4096, 1024, False): SkinnyConfig(16, 1024, True, 4, 1, True, 0, False),  # 4.0 us, cuBLAS 5.2
    (16, 4096, 1024, False): SkinnyConfig(16, 512, True, 4, 3, True, 0, False),  # 5.1 us, cuBLAS 5.2
    (1, 1024, 2048, False): SkinnyConfig(8, 2048, True, 8, 1, True, 0, True),  # 2.1 us, cuBLAS 10.3
    (2, 1024, 2048, False): SkinnyConfig(8, 2048, True, 8, 1, True, 0, False),  # 2.5 us, cuBLAS 9.8
    (4, 1024, 2048, False): SkinnyConfig(8, 2048, True, 8, 1, True, 0, False),  # 2.7 us, cuBLAS 10.3
    (8, 1024, 2048, False): SkinnyConfig(16, 2048, True, 8, 1, True, 0, False),  # 3.1 us, cuBLAS 5.8
    (16, 1024, 2048, False): SkinnyConfig(16, 1024, True, 4, 3, False, 2048, False),  # 3.6 us, cuBLAS 5.8
    (1, 6144, 1024, True): SkinnyConfig(8, 1024, False, 4, 1, True, 0, False),  # 3.7 us, cuBLAS 5.9
    (2, 6144, 1024, True): SkinnyConfig(8, 1024, True, 4, 1, True, 0, False),  # 4.1 us, cuBLAS 5.8
    (4, 6144, 1024, True): SkinnyConfig(8, 1024, True, 4, 1, True, 0, False),  # 5.0 us, cuBLAS 5.8
    (8, 6144, 1024, True): SkinnyConfig(8, 1024, True, 4, 1, True, 0, False),  # 5.8 us, cuBLAS 5.8
    (16, 6144, 1024, True): SkinnyConfig(16, 512, True, 4, 2, True, 1024, False),  # 7.0 us, cuBLAS 5.8
    (1, 1024, 3072, False): SkinnyConfig(2, 4096, False, 4, 1, True, 3072, False),  # 2.3 us, cuBLAS 7.6
    (2, 1024, 3072, False): SkinnyConfig(2, 4096, False, 4, 1, True, 0, False),  # 2.9 us, cuBLAS 7.6
    (4, 1024, 3072, False): SkinnyConfig(16, 1024, True, 4, 3, True, 3072, False),  # 3.9 us, cuBLAS 7.7
    (8, 1024, 3072, False): SkinnyConfig(16, 1024, True, 4, 3, True, 3072, False),  # 4.5 us, cuBLAS 7.7
    (16, 1024, 3072, False): SkinnyConfig(16, 1024, True, 4, 3, False, 3072, False),  # 4.5 us, cuBLAS 7.8
    (1, 151936, 1024, False): SkinnyConfig(8, 1024, False, 2, 1, True, 0, True),  # 70.9 us, cuBLAS 77.6
    (2, 151936, 1024, False): SkinnyConfig(8, 1024, False, 2, 1, True, 0, False),  # 73.2 us, cuBLAS 78.1
    (4, 151936, 1024, False): None,  # 90.4 us, cuBLAS 78.8
    (8, 151936, 1024, False): None,  # 97.3 us, cuBLAS 80.2
    (16, 151936, 1024, False): None,  # 109.8 us, cuBLAS 81.1
    # Qwen3-8B
    (1, 6144, 4096, False): SkinnyConfig(4, 4096, False, 4, 1, True, 0, True),  # 12.7 us, cuBLAS 15.3
    (2, 6144, 4096, False): SkinnyConfig(4, 4096, False, 4, 1, True, 0, False),  # 14.2 us, cuBLAS 16.1
    (4, 6144, 4096, False): SkinnyConfig(32, 512, True, 4, 3, True, 2048, False),  # 17.4 us, cuBLAS 15.9
    (8, 6144, 4096, False): None,  # 18.2 us, cuBLAS 15.5
    (16, 6144, 4096, False): None,  # 21.7 us, cuBLAS 15.6
    (1, 4096, 4096, False): SkinnyConfig(4, 4096, False, 8, 1, True, 0, True),  # 9.0 us, cuBLAS 13.6
    (2, 4096, 4096, False): SkinnyConfig(4, 4096, False, 4, 1, True, 0, False),  # 10.5 us, cuBLAS 13.5
    (4, 4096, 4096, False): SkinnyConfig(4, 4096, False, 4, 1, True, 0, False),  # 11.8 us, cuBLAS 13.4
    (8, 4096, 4096, False): SkinnyConfig(16, 1024, True, 4, 3, True, 4096, False),  # 13.1 us, cuBLAS 13.3
    (16, 4096, 4096, False): SkinnyConfig(32, 512, True, 4, 3, True, 0, False),  # 13.0 us, cuBLAS 13.4
    (1, 24576, 4096, True): SkinnyConfig(2, 4096, False, 4, 1, True, 0, True),  # 45.1 us, cuBLAS 47.8
    (2, 24576, 4096, True): SkinnyConfig(2, 4096, False, 4, 1, True, 0, False),  # 46.7 us, cuBLAS 48.0
    (4, 24576, 4096, True): None,  # 56.9 us, cuBLAS 48.1
    (8, 24576, 4096, True): None,  # 57.1 us, cuBLAS 52.9
    (16, 24576, 4096, True): None,  # 60.9 us, cuBLAS 48.9
    (1, 4096, 12288, False): SkinnyConfig(4, 4096, False, 8, 1, True, 2048, True),  # 22.5 us, cuBLAS 29.2
    (2, 4096, 12288, False): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 24.4 us, cuBLAS 30.3
    (4, 4096, 12288, False): SkinnyConfig(8, 1024, True, 4, 3, True, 2048, False),  # 24.9 us, cuBLAS 29.7
    (8, 4096, 12288, False): SkinnyConfig(16, 1024, True, 4, 3, True, 2048, False),  # 25.8 us, cuBLAS 30.0
    (16, 4096, 12288, False): SkinnyConfig(16, 512, True, 8, 3, False, 2048, False),  # 28.5 us, cuBLAS 28.5
    (1, 151936, 4096, False): SkinnyConfig(4, 4096, False, 4, 1, True, 0, True),  # 269.2 us, cuBLAS 284.4
    (2, 151936, 4096, False): SkinnyConfig(4, 4096, False, 4, 1, True, 0, False),  # 272.2 us, cuBLAS 285.3
    (4, 151936, 4096, False): None,  # 314.1 us, cuBLAS 286.6
    (8, 151936, 4096, False): None,  # 342.5 us, cuBLAS 287.6
    (16, 151936, 4096, False): None,  # 315.7 us, cuBLAS 290.7
}
# Of other shapes, so many rows at most: there, a linear layer is the reading of its weight whatever the model.
UNMEASURED_ROWS = 2


def choose_config(bucket: int, weight_rows: int, columns: int, gated: bool) -> SkinnyConfig | None:
    """The config for `bucket` (1, 2, 4, 8, 16) rows and a weight of [weight_rows, columns]; None if it does not pay."""
    shape = (bucket, weight_rows, columns, gated)
    if shape in MEASURED:
        return MEASURED[shape]
    return rule(bucket, weight_rows, columns, gated) if bucket <= UNMEASURED_ROWS else None


def rule(bucket: int, weight_rows: int, columns: int, gated: bool) -> SkinnyConfig:
    """Small tiles, so that every multiprocessor gets some; larger ones where re-reading the input would show.

    A block of columns, the weight's and the input's, has to fit a program's registers.
    """
    outputs = weight_rows // 2 if gated else weight_rows
    block_k = max(64, min(1024 if bucket <= 8 else 512, next_power_of_2(columns)))
    block_n = 4 if gated else 8
    largest = max(block_n, bucket if gated else 2 * bucket)
    while block_n < largest and cdiv(outputs, 2 * block_n) >= LEAST_PROGRAMS:
        block_n *= 2
    return SkinnyConfig(block_n, block_k, dot=bucket > 1, prefetch=min(columns, 2 * block_k))
