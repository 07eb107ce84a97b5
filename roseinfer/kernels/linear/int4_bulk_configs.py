"""Configs of `int4_bulk_product`: measured ones by shape, and the rule for other shapes."""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from roseinfer.kernels.common.triton_support import cdiv
from roseinfer.kernels.common.tuning import TuningTable
from roseinfer.kernels.linear.int4_codes import BLOCK_COLUMNS

# Outputs of a group of warps: rows of the weight that the matrix units take.
WEIGHT_TILE_ROWS = 64
# Registers of a thread of the two warps that copy.
COPYING_REGISTER_COUNT = 24
_REGISTERS_OF_PROCESSOR, _MAX_REGISTERS = 65_536, 240


@dataclass(frozen=True, slots=True)
class BulkConfig:
    """Division of a product. It decides the speed, and the order of a sum's terms.

    block_m: rows of the input in a tile, 16 to 256, a power of two. out_groups: times 64 outputs. column_groups: groups
    of four warps that multiply blocks of 128 columns in turn. There are 1 to 4 groups of warps, out_groups *
    column_groups. shares: programs that divide a tile's columns among them. x_stages, w_stages: blocks of the input and
    of the weight in shared memory, multiples of column_groups. max_registers: of a thread on average, so that several
    programs fit a multiprocessor; None: one program has them all.

    Raises ValueError for other stages. With these a group has stages of its own, and waits for each copy there. A
    barrier only tells odd copies from even ones: a group that shares a stage with others and is ahead of them would
    take the copy before the last for its own.
    """

    block_m: int
    out_groups: int
    column_groups: int
    shares: int
    x_stages: int
    w_stages: int
    max_registers: int | None = None

    def __post_init__(self) -> None:
        if self.x_stages % self.column_groups or self.w_stages % self.column_groups:
            raise ValueError(f"{self.column_groups} groups cannot share {self.x_stages} and {self.w_stages} stages")

    @property
    def registers(self) -> int:
        """Number of registers of a thread that multiplies. Two warps copy, and two fill up a group."""
        groups = self.out_groups * self.column_groups
        average = self.max_registers or _REGISTERS_OF_PROCESSOR // (128 * (groups + 1)) // 8 * 8
        left = average * (groups + 1) - COPYING_REGISTER_COUNT
        return min(left // groups // 8 * 8, _MAX_REGISTERS)


# Numbers of rows that are compiled and measured separately, each for all numbers up to it.
BUCKETS = (16, 32, 64, 128, 256, 512)
MAX_ROWS = BUCKETS[-1]
# Shapes that were not measured take the kernel up to so many rows.
_MAX_UNMEASURED_ROWS = 256
_MIN_PROGRAMS = 96
_SHARES = (1, 2, 3, 4)
# By rows of a tile.
_X_STAGES = {16: 8, 32: 6, 64: 4, 128: 3}

TABLE: TuningTable[BulkConfig] = TuningTable(
    Path(__file__).with_name("tuning") / "int4_bulk.json",
    {"max_rows": int, "outs": int, "columns": int},
    {"bulk": BulkConfig},
)


def choose_bulk_config(rows: int, outs: int, columns: int) -> BulkConfig | None:
    """Return the config for `rows` rows and a weight of [outs, columns]; None if the library has to multiply."""
    if rows > MAX_ROWS:
        return None
    columns = cdiv(columns, BLOCK_COLUMNS) * BLOCK_COLUMNS
    return TABLE.choose((BUCKETS[bisect_left(BUCKETS, rows)], outs, columns), rule)


def rule(bucket: int, outs: int, columns: int) -> BulkConfig | None:
    """Return a config for any shape. Tiles get shares of the columns until most multiprocessors have some."""
    if bucket > _MAX_UNMEASURED_ROWS:
        return None
    block_m = min(bucket, 128)
    out_groups = 3 if outs >= 3 * WEIGHT_TILE_ROWS * _MIN_PROGRAMS else 2
    tiles = cdiv(outs, WEIGHT_TILE_ROWS * out_groups) * cdiv(bucket, block_m)
    possible = [shares for shares in _SHARES if columns // BLOCK_COLUMNS % shares == 0]
    shares = next((shares for shares in possible if tiles * shares >= _MIN_PROGRAMS), possible[-1])
    return BulkConfig(block_m, out_groups, 1, shares, _X_STAGES[block_m], 6 if out_groups < 3 else 4)
