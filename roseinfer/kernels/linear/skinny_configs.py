"""Configs of `skinny_linear`: measured ones by shape, and the rule for other shapes."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2
from roseinfer.kernels.common.tuning import TuningTable


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Division of a linear layer. It decides the speed, and the order of a sum's terms.

    block_n: outputs that a program computes; when gated, of gate and up each. block_k: columns that it takes at a time,
    a power of two, at least 16 * warps. dot: multiply on the tensor cores, else elementwise in float32. stages: depth
    of the software pipeline over blocks of columns (1: none). preload: read the first block of columns into registers
    before waiting for the input. prefetch: columns of every weight row to request into the L2 cache before waiting.
    evict_first: mark the weight as the first to leave the L2 cache. `preload` and `prefetch` gain with `overlap` only.
    """

    block_n: int
    block_k: int
    dot: bool
    warps: int = 4
    stages: int = 3
    preload: bool = True
    prefetch: int = 0
    evict_first: bool = False


@dataclass(frozen=True, slots=True)
class DirectConfig:
    """Division of a linear layer by `skinny_direct_kernel`, before which norms are kernels of their own.

    block_n: outputs that a program computes, a multiple of 16, or of 8 if gated. block_k: columns that it takes at a
    time, a multiple of 128 for each of its warps; has to divide the columns. ahead: load a block of columns while the
    one before is multiplied. max_registers: of a thread; None: as many as the compiler takes.
    """

    block_n: int
    block_k: int
    warps: int = 4
    ahead: bool = False
    max_registers: int | None = None


# About two programs for each multiprocessor of an H200.
MIN_PROGRAMS = 256

TABLE: TuningTable[SkinnyConfig | DirectConfig] = TuningTable(
    Path(__file__).with_name("tuning") / "skinny.json",
    {"rows": int, "weight_rows": int, "columns": int, "gated": bool},
    {"skinny": SkinnyConfig, "direct": DirectConfig},
)
# Up to so many rows, a linear layer of any shape is the reading of its weight, and these kernels pay unmeasured.
MAX_UNMEASURED_ROWS = 2
# The same for `skinny_direct_kernel`, and weights of up to so many rows: larger ones are heads, which were measured.
MAX_UNMEASURED_DIRECT_ROWS, _MAX_UNMEASURED_WEIGHT_ROWS = 8, 65_536


@cache  # called for every layer of every step
def choose_config(
    bucket: int, weight_rows: int, columns: int, gated: bool, *, direct: bool = True
) -> SkinnyConfig | DirectConfig | None:
    """Return the config for `bucket` (1, 2, 4, 8, 16) rows; None if the kernel does not pay.

    The weight has the shape [weight_rows, columns]. direct: `skinny_direct_kernel` is available.
    """
    config = TABLE.choose((bucket, weight_rows, columns, gated), _unmeasured)
    if isinstance(config, DirectConfig) and not direct:
        return rule(bucket, weight_rows, columns, gated) if bucket <= MAX_UNMEASURED_ROWS else None
    return config


def _unmeasured(bucket: int, weight_rows: int, columns: int, gated: bool) -> SkinnyConfig | DirectConfig | None:
    if bucket <= MAX_UNMEASURED_ROWS:
        return rule(bucket, weight_rows, columns, gated)
    if bucket <= MAX_UNMEASURED_DIRECT_ROWS and weight_rows <= _MAX_UNMEASURED_WEIGHT_ROWS:
        return direct_rule(weight_rows, columns, gated)
    return None


def direct_rule(weight_rows: int, columns: int, gated: bool) -> DirectConfig | None:
    """Return a config for 3 to 8 rows by a weight of any shape; None if the kernel does not support it."""
    if columns % 512:
        return None
    block_k = 1024 if columns % 1024 == 0 else 512
    eight = block_k == 1024 and (gated or cdiv(weight_rows, 16) <= MIN_PROGRAMS)
    return DirectConfig(8 if gated else 16, block_k, 8 if eight else 4, gated, max_registers=128)


def rule(bucket: int, weight_rows: int, columns: int, gated: bool) -> SkinnyConfig:
    """Return a config for any shape, measured or not.

    Tiles are small, so that every multiprocessor gets some, and larger where re-reading the input would show. A block
    of columns, the weight's and the input's, has to fit a program's registers.
    """
    outputs = weight_rows // 2 if gated else weight_rows
    block_k = max(64, min(1024 if bucket <= 8 else 512, next_power_of_2(columns)))
    block_n = 4 if gated else 8
    largest = max(block_n, bucket if gated else 2 * bucket)
    while block_n < largest and cdiv(outputs, 2 * block_n) >= MIN_PROGRAMS:
        block_n *= 2
    return SkinnyConfig(block_n, block_k, dot=bucket > 1, prefetch=min(columns, 2 * block_k))
