"""Configs of `skinny_linear` for FP8 weights: measured ones by shape, and the rule for other shapes.

A load of 16 bytes holds twice the columns of a weight in 16 bits, and there is half as much to read, so other configs
are the fastest.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2
from roseinfer.kernels.common.tuning import TuningTable
from roseinfer.kernels.linear.skinny_configs import MAX_UNMEASURED_ROWS, MIN_PROGRAMS, SkinnyConfig


@dataclass(frozen=True, slots=True)
class PairsConfig:
    """Division of a linear layer by `skinny_pairs_kernel`, which has no LayerNorm. Fields as in `SkinnyConfig`.

    block_k: a power of two, at least 128; the columns may end within the last block. stages: 1, or one more than the
    tiles being copied into shared memory. programs: per multiprocessor; 0: one for each tile.
    """

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 2
    programs: int = 4
    evict_first: bool = True


Fp8Config = SkinnyConfig | PairsConfig
# The columns of a weight are a multiple of this.
PAIRS_COLUMNS = 16
# Registers of a thread times warps, up to which four programs of `skinny_pairs_kernel` run at once.
MAX_PAIRS_REGISTERS = 512


def slices(config: SkinnyConfig, *, blocks: bool) -> int:
    """Return the number of slices of a block of columns: one for each warp.

    With `blocks` of scales no slice crosses a block's border.
    """
    if not config.dot:
        return 1
    return max(config.warps, config.block_k // SCALE_BLOCK) if blocks else config.warps


TABLE: TuningTable[Fp8Config] = TuningTable(
    Path(__file__).with_name("tuning") / "skinny_fp8.json",
    {"rows": int, "weight_rows": int, "columns": int, "gated": bool, "blocks": bool},
    {"skinny": SkinnyConfig, "pairs": PairsConfig},
)


@cache  # called for every layer of every step
def choose_fp8_config(bucket: int, weight_rows: int, columns: int, gated: bool, *, blocks: bool) -> Fp8Config | None:
    """Return the config for `bucket` (1, 2, 4, 8, 16) rows; None if the kernel does not pay.

    The weight has the shape [weight_rows, columns]. blocks: each block of 128 x 128 has a scale, else each row.
    """
    return TABLE.choose((bucket, weight_rows, columns, gated, blocks), _unmeasured)


def _unmeasured(bucket: int, weight_rows: int, columns: int, gated: bool, blocks: bool) -> Fp8Config | None:
    if bucket == 1 and columns % (SCALE_BLOCK if blocks else PAIRS_COLUMNS) == 0:
        return pairs_rule(weight_rows, columns, gated)
    return fp8_rule(bucket, weight_rows, columns, gated) if bucket <= MAX_UNMEASURED_ROWS else None


def pairs_rule(weight_rows: int, columns: int, gated: bool) -> PairsConfig:
    """Return a config for one row by a weight of any shape.

    It takes 5% to 44% less than `fp8_rule` with ten shapes of Qwen3.6-27B and 35B-A3B, and up to 11% more than the
    fastest one (H200, torch 2.11, Triton 3.6; 2026-11-28).
    """
    outputs = weight_rows // 2 if gated else weight_rows
    block_n = 4 if gated or cdiv(outputs, 8) <= MIN_PROGRAMS else 8
    block_k = max(128, min(2048, next_power_of_2(columns)))
    return PairsConfig(block_n, block_k, warps=max(1, block_k // 512), stages=1, programs=0)


def fp8_rule(bucket: int, weight_rows: int, columns: int, gated: bool) -> SkinnyConfig:
    """Return a config for any shape, as `skinny_configs.rule` does. A tile's rows lie in one block of scales."""
    outputs = weight_rows // 2 if gated else weight_rows
    block_k = max(128, min(1024, next_power_of_2(columns)))
    block_n = 4 if gated else 8
    largest = max(block_n, bucket if gated else 2 * bucket)
    while block_n < largest and cdiv(outputs, 2 * block_n) >= MIN_PROGRAMS:
        block_n *= 2
    return SkinnyConfig(block_n, block_k, dot=bucket > 1, prefetch=min(columns, 2 * block_k))
