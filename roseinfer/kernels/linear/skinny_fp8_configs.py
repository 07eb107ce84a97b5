"""How `skinny_linear` cuts its work by weights in FP8, by shape: as `skinny_configs`, whose terms are used here.

A load of 16 bytes holds twice the columns, and there is half as much to read, so other cuts are the fastest.
"""

from dataclasses import dataclass

from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2
from roseinfer.kernels.linear.skinny_configs import LEAST_PROGRAMS, UNMEASURED_ROWS, SkinnyConfig


@dataclass(frozen=True, slots=True)
class PairsConfig:
    """How `skinny_pairs` cuts the work, which has no LayerNorm. Terms as in `SkinnyConfig`.

    block_k: a multiple of 128 that divides the columns. stages: 1, or one more than the tiles that are on their way
    into shared memory. programs: of a multiprocessor; 0: one for each tile.
    """

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 2
    programs: int = 4
    evict_first: bool = True


Fp8Config = SkinnyConfig | PairsConfig


def slices(config: SkinnyConfig, *, blocks: bool) -> int:
    """Slices of a block of columns: one for each warp; with `blocks` of scales, none crosses a block's border."""
    if not config.dot:
        return 1
    return max(config.warps, config.block_k // SCALE_BLOCK) if blocks else config.warps


# (bucket of rows, weight rows, columns, gated, scales by blocks)
Fp8Shape = tuple[int, int, int, bool, bool]

# Fastest on an H200 (torch 2.11, CUDA 13.0, Triton 3.6; 2026-11-23), with `overlap`; microseconds of each with weights
# that come from memory, but chosen in a chain of layers with attention, where they overlap. By blocks, a layer with
# attention takes 60, 72 and 79 us at 1, 2 and 4 rows; by channels 60 at 1. None where `fp8_tiles`, which rounds its
# input, is faster.
MEASURED: dict[Fp8Shape, Fp8Config | None] = {
    # Qwen3-8B, scales by channels
    (1, 6144, 4096, False, False): PairsConfig(4, 4096),
    (2, 6144, 4096, False, False): SkinnyConfig(16, 1024, True, 4, 3, True, 2048, False),  # 9.7 us
    (4, 6144, 4096, False, False): SkinnyConfig(16, 512, True, 4, 3, True, 2048, False),  # 11.2 us
    (8, 6144, 4096, False, False): None,  # 12.4 us
    (16, 6144, 4096, False, False): None,  # 15.2 us
    (1, 4096, 4096, False, False): PairsConfig(8, 4096, 8, 1, 0),
    (2, 4096, 4096, False, False): SkinnyConfig(8, 1024, True, 4, 3, True, 2048, False),  # 6.5 us
    (4, 4096, 4096, False, False): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 7.0 us
    (8, 4096, 4096, False, False): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 8.0 us
    (16, 4096, 4096, False, False): None,  # 10.6 us
    (1, 24576, 4096, True, False): PairsConfig(4, 4096, 4, 1, 4),
    (2, 24576, 4096, True, False): SkinnyConfig(16, 512, True, 4, 3, True, 2048, False),  # 32.9 us
    (4, 24576, 4096, True, False): None,  # 33.7 us
    (8, 24576, 4096, True, False): None,  # 35.7 us
    (16, 24576, 4096, True, False): None,  # 47.2 us
    (1, 4096, 12288, False, False): PairsConfig(4, 4096, 4, 1, 4),
    (2, 4096, 12288, False, False): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 17.8 us
    (4, 4096, 12288, False, False): None,  # 19.9 us
    (8, 4096, 12288, False, False): None,  # 17.6 us
    (16, 4096, 12288, False, False): None,  # 20.1 us
    # Qwen3-8B, scales by blocks
    (1, 6144, 4096, False, True): PairsConfig(4, 4096),
    (2, 6144, 4096, False, True): PairsConfig(4, 4096),
    (4, 6144, 4096, False, True): SkinnyConfig(16, 512, True, 4, 3, True, 2048, False),  # 11.2 us
    (8, 6144, 4096, False, True): None,  # 12.4 us
    (16, 6144, 4096, False, True): None,  # 15.2 us
    (1, 4096, 4096, False, True): PairsConfig(8, 4096, 8, 1, 0),
    (2, 4096, 4096, False, True): PairsConfig(8, 4096, 8, 1, 0),
    (4, 4096, 4096, False, True): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 7.0 us
    (8, 4096, 4096, False, True): SkinnyConfig(16, 1024, True, 8, 3, True, 2048, False),  # 8.0 us
    (16, 4096, 4096, False, True): None,  # 10.6 us
    (1, 24576, 4096, True, True): PairsConfig(4, 4096, 4, 1, 4),
    (2, 24576, 4096, True, True): PairsConfig(4, 4096, 4, 3, 3),
    (4, 24576, 4096, True, True): SkinnyConfig(16, 512, True, 4, 3, True, 2048, False),  # 33.7 us
    (8, 24576, 4096, True, True): None,  # 35.7 us
    (16, 24576, 4096, True, True): None,  # 47.2 us
    (1, 4096, 12288, False, True): PairsConfig(4, 4096, 4, 1, 4),
    (2, 4096, 12288, False, True): PairsConfig(4, 4096, 4, 1, 0),
    (4, 4096, 12288, False, True): SkinnyConfig(8, 1024, True, 4, 3, True, 2048, False),  # 19.9 us
    (8, 4096, 12288, False, True): None,  # 17.6 us
    (16, 4096, 12288, False, True): None,  # 20.1 us
}


def choose_fp8_config(bucket: int, weight_rows: int, columns: int, gated: bool, *, blocks: bool) -> Fp8Config | None:
    """The config for `bucket` (1, 2, 4, 8, 16) rows and a weight of [weight_rows, columns]; None if it does not pay.

    `blocks`: each block of 128 x 128 has a scale, not each row.
    """
    shape = (bucket, weight_rows, columns, gated, blocks)
    if shape in MEASURED:
        return MEASURED[shape]
    return fp8_rule(bucket, weight_rows, columns, gated) if bucket <= UNMEASURED_ROWS else None


def fp8_rule(bucket: int, weight_rows: int, columns: int, gated: bool) -> SkinnyConfig:
    """As `skinny_configs.rule`; a tile's rows lie in one block of scales."""
    outputs = weight_rows // 2 if gated else weight_rows
    block_k = max(128, min(1024, next_power_of_2(columns)))
    block_n = 4 if gated else 8
    largest = max(block_n, bucket if gated else 2 * bucket)
    while block_n < largest and cdiv(outputs, 2 * block_n) >= LEAST_PROGRAMS:
        block_n *= 2
    return SkinnyConfig(block_n, block_k, dot=bucket > 1, prefetch=min(columns, 2 * block_k))
