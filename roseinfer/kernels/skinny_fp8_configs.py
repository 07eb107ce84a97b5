"""How `skinny_linear` cuts its work by weights in FP8, by shape: as `skinny_configs`, whose terms are used here.

A load of 16 bytes holds twice the columns, and there is half as much to read, so other cuts are the fastest.
"""

from roseinfer.kernels.skinny_configs import LEAST_PROGRAMS, UNMEASURED_ROWS, Shape, SkinnyConfig, StreamConfig
from roseinfer.kernels.triton_support import cdiv, next_power_of_2

SCALE_BLOCK = 128  # rows and columns that share a scale, where a block has one


def slices(config: SkinnyConfig, *, blocks: bool) -> int:
    """Slices of a block of columns: one for each warp; with `blocks` of scales, none crosses a block's border."""
    if not config.dot:
        return 1
    return max(config.warps, config.block_k // SCALE_BLOCK) if blocks else config.warps


# Fastest on an H200 (torch 2.11, CUDA 13.0, Triton 3.6; 2026-11-23), with `overlap`, with scales by blocks; those of
# rows take as long. Each with weights that come from memory; at 1 row the four together were chosen in a chain of 36
# layers with attention, too (66.8 us a layer). None where `fp8_tiles`, which rounds its input, is faster.
MEASURED: dict[Shape, SkinnyConfig | StreamConfig | None] = {
    # Qwen3-8B
    (1, 6144, 4096, False): StreamConfig(4, 4096, 4, 1, 4),  # 8.4 us
    (2, 6144, 4096, False): SkinnyConfig(16, 1024, True, 4, 3, True, 2048, False),  # 9.7 us
    (4, 6144, 4096, False): SkinnyConfig(16, 1024, True, 4, 3, True, 2048, False),  # 11.2 us
    (8, 6144, 4096, False): None,  # 12.4 us
    (16, 6144, 4096, False): None,  # 15.2 us
    (1, 4096, 4096, False): SkinnyConfig(4, 4096, False, 8, 1, True, 0, True),  # 5.9 us
    (2, 4096, 4096, False): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 6.5 us
    (4, 4096, 4096, False): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 7.0 us
    (8, 4096, 4096, False): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 8.0 us
    (16, 4096, 4096, False): None,  # 10.6 us
    (1, 24576, 4096, True): StreamConfig(4, 4096, 4, 2, 3),  # 27.5 us
    (2, 24576, 4096, True): SkinnyConfig(16, 512, True, 4, 3, True, 2048, False),  # 32.9 us
    (4, 24576, 4096, True): None,  # 33.7 us
    (8, 24576, 4096, True): None,  # 35.7 us
    (16, 24576, 4096, True): None,  # 47.2 us
    (1, 4096, 12288, False): SkinnyConfig(8, 2048, False, 4, 2, True, 0, True),  # 13.9 us
    (2, 4096, 12288, False): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 17.8 us
    (4, 4096, 12288, False): None,  # 19.9 us
    (8, 4096, 12288, False): None,  # 17.6 us
    (16, 4096, 12288, False): None,  # 20.1 us
}


def choose_fp8_config(bucket: int, weight_rows: int, columns: int, gated: bool) -> SkinnyConfig | StreamConfig | None:
    """The config for `bucket` (1, 2, 4, 8, 16) rows and a weight of [weight_rows, columns]; None if it does not pay."""
    shape = (bucket, weight_rows, columns, gated)
    if shape in MEASURED:
        return MEASURED[shape]
    return fp8_rule(*shape) if bucket <= UNMEASURED_ROWS else None


def fp8_rule(bucket: int, weight_rows: int, columns: int, gated: bool) -> SkinnyConfig:
    """As `skinny_configs.rule`; a tile's rows lie in one block of scales."""
    outputs = weight_rows // 2 if gated else weight_rows
    block_k = max(128, min(1024, next_power_of_2(columns)))
    block_n = 4 if gated else 8
    largest = max(block_n, bucket if gated else 2 * bucket)
    while block_n < largest and cdiv(outputs, 2 * block_n) >= LEAST_PROGRAMS:
        block_n *= 2
    return SkinnyConfig(block_n, block_k, dot=bucket > 1, prefetch=min(columns, 2 * block_k))
