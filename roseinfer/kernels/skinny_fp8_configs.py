"""How `skinny_linear` cuts its work by weights in FP8, by shape: as `skinny_configs`, whose terms are used here.

A load of 16 bytes holds twice the columns, and there is half as much to read, so other cuts are the fastest.
"""

from roseinfer.kernels.skinny_configs import LEAST_PROGRAMS, UNMEASURED_ROWS, SkinnyConfig
from roseinfer.kernels.triton_support import cdiv, next_power_of_2

SCALE_BLOCK = 128  # rows and columns that share a scale, where a block has one


def slices(config: SkinnyConfig, *, blocks: bool) -> int:
    """Slices of a block of columns: one for each warp; with `blocks` of scales, none crosses a block's border."""
    if not config.dot:
        return 1
    return max(config.warps, config.block_k // SCALE_BLOCK) if blocks else config.warps


def choose_fp8_config(bucket: int, weight_rows: int, columns: int, gated: bool, *, blocks: bool) -> SkinnyConfig | None:
    """The config for `bucket` (1, 2, 4, 8, 16) rows and a weight of [weight_rows, columns]; None if it does not pay."""
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
