"""Configs of `int4_linear`: measured ones by shape, and the rules for other shapes."""

from functools import cache
from pathlib import Path

from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2
from roseinfer.kernels.common.tuning import TuningTable
from roseinfer.kernels.linear.int4_codes import BLOCK_COLUMNS
from roseinfer.kernels.linear.skinny_configs import MIN_PROGRAMS, DirectConfig
from roseinfer.kernels.linear.skinny_fp8_configs import PairsConfig

Int4Config = PairsConfig | DirectConfig

# Of int4, and of NVFP4 where those are others.
TABLE, NVFP4_TABLE = (
    TuningTable[Int4Config](
        Path(__file__).with_name("tuning") / name,
        {"rows": int, "weight_rows": int, "columns": int, "gated": bool},
        {"pairs": PairsConfig, "direct": DirectConfig},
    )
    for name in ("skinny_int4.json", "skinny_nvfp4.json")
)
# Up to so many rows, shapes that were not measured are multiplied in pairs of float16.
_MAX_UNMEASURED_PAIRS_ROWS = 1
# Without the other kernel, up to so many.
_MAX_PAIRS_ROWS = 2
_MAX_CHUNK_COLUMNS = 4096


@cache  # called for every layer of every step
def choose_int4_config(
    bucket: int, weight_rows: int, columns: int, gated: bool, *, nvfp4: bool = False, direct: bool = True
) -> Int4Config | None:
    """Return the config for `bucket` (1, 2, 4, 8, 16) rows; None if tiles are faster.

    The weight has the shape [weight_rows, columns], a multiple of 128 columns. nvfp4: it is in NVFP4. direct:
    `skinny_direct_kernel` is available.
    """
    shape = bucket, weight_rows, columns, gated
    table = NVFP4_TABLE if nvfp4 and shape in NVFP4_TABLE.entries else TABLE
    config = table.choose(shape, _unmeasured)
    if isinstance(config, DirectConfig) and not direct:
        return pairs_rule(weight_rows, columns, gated) if bucket <= _MAX_PAIRS_ROWS else None
    return config


def _unmeasured(bucket: int, weight_rows: int, columns: int, gated: bool) -> Int4Config:
    rule = pairs_rule if bucket <= _MAX_UNMEASURED_PAIRS_ROWS else direct_rule
    return rule(weight_rows, columns, gated)


def pairs_rule(weight_rows: int, columns: int, gated: bool) -> PairsConfig:
    """Return a config for a row or two by a weight of any shape. Programs stay where there are many tiles."""
    block_n = 8 if gated or columns <= _MAX_CHUNK_COLUMNS else 16
    stays = cdiv(weight_rows, 2 * block_n if gated else block_n) > 4 * MIN_PROGRAMS
    block_k = min(_MAX_CHUNK_COLUMNS, next_power_of_2(columns))
    return PairsConfig(block_n, block_k, stages=1, programs=3 if stays else 0)


def direct_rule(weight_rows: int, columns: int, gated: bool) -> DirectConfig:
    """Return a config for more rows by a weight of any shape. Each warp has the same number of blocks of 128 columns,
    and there are more warps where there are few programs.
    """
    divisions = ((8, 2), (8, 1)) if cdiv(weight_rows, 16) <= MIN_PROGRAMS else ((4, 2),)
    blocks = columns // BLOCK_COLUMNS
    warps, pieces = next(each for each in (*divisions, (4, 1), (2, 1), (1, 1)) if blocks % (each[0] * each[1]) == 0)
    return DirectConfig(16, BLOCK_COLUMNS * warps * pieces, warps, ahead=True, max_registers=128)
