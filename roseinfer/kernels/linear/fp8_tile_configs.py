"""Configs of `tile_product`: measured ones by shape, and the rule for other shapes."""

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from roseinfer.kernels.common.triton_support import cdiv
from roseinfer.kernels.common.tuning import TuningTable


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Division of a product. It decides the speed, and the order of a sum's terms.

    block_m: rows of the input in a tile, a power of two; at least 16, or 64 unless `weight_first`. block_n: rows of the
    weight, at least 64 if `weight_first`. block_k: columns taken at a time, 128 with scales by blocks. shares: programs
    that divide a tile's columns among them. stages: blocks of columns being copied at a time. weight_first: the
    weight's rows are the long side of the matrix units, so that few rows of the input do not leave them idle. ahead:
    read a program's whole part of the weight before its input is there, whatever `stages` says. It needs
    `weight_first`, and the part has to fit shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    shares: int
    warps: int
    stages: int
    weight_first: bool
    ahead: bool = False


# Numbers of rows that are compiled and measured separately, each for all numbers up to it.
BUCKETS = (16, 32, 64, 128, 192, 256, 384, 576, 832, 1088)
MAX_ROWS = BUCKETS[-1]
# Shapes that were not measured take these kernels up to so many rows, and the library's for more.
MAX_UNMEASURED_ROWS = 256
# An H200's multiprocessors, and programs that keep its memory busy: about one for each.
_PROCESSORS, _MIN_PROGRAMS = 132, 128
_SHARES = (1, 2, 3, 4, 6, 8)
# Stages of a program by blocks, and what they may hold: two programs then fit a multiprocessor.
_MIN_STAGES, _MAX_STAGES, _MAX_STAGES_BYTES = 4, 8, 98_304
_SHARED_BYTES = 232_448  # of a multiprocessor

TABLE: TuningTable[TileConfig] = TuningTable(
    Path(__file__).with_name("tuning") / "fp8_tiles.json",
    {"max_rows": int, "outs": int, "columns": int, "blocks": bool},
    {"tiles": TileConfig},
)


def choose_tile_config(rows: int, outs: int, columns: int, *, blocks: bool) -> TileConfig | None:
    """Return the config for `rows` rows and a weight of [outs, columns]; None if the library has to multiply.

    blocks: each block of 128 x 128 has a scale, else each row of the weight.
    """
    if not 1 <= rows <= MAX_ROWS or columns % 128:
        return None
    return TABLE.choose((BUCKETS[bisect_left(BUCKETS, rows)], outs, columns, blocks), rule)


def rule(bucket: int, outs: int, columns: int, blocks: bool) -> TileConfig | None:
    """Return a config for any shape; None where there are many tiles of many rows.

    Tiles get shares of the columns until every multiprocessor has some. By blocks, programs get many stages if all run
    at once nevertheless. With seven shapes of Qwen3.6, products and rounding then take up to 38% less than with four
    stages at 16 rows, 29% at 32, 19% at 64 and, where there is a config, 21% at 128; none took longer (H200, torch
    2.11, Triton 3.6; 2026-11-28).
    """
    if bucket > MAX_UNMEASURED_ROWS:
        return None
    weight_first = bucket <= (32 if blocks else 64)
    block_m, block_k = min(bucket, 64), 256 if columns % 256 == 0 and not blocks else 128
    tiles = cdiv(outs, 64) * cdiv(bucket, block_m)
    if bucket > 64 and tiles > 2 * _MIN_PROGRAMS:
        return None
    possible = [shares for shares in _SHARES if columns // block_k % shares == 0]
    shares = next((shares for shares in possible if tiles * shares >= _MIN_PROGRAMS), possible[-1])
    stages = _stages(tiles * shares, (block_m + 64) * block_k) if blocks else _MIN_STAGES
    return TileConfig(block_m, 64, block_k, shares, 4, stages, weight_first)


def _stages(programs: int, stage_bytes: int) -> int:
    """Return the most stages with which so many programs run at once; else, those that leave the fewest places unused
    while the last ones run.
    """

    def rounds(stages: int) -> float:
        return programs / (_PROCESSORS * (_SHARED_BYTES // (stages * stage_bytes)))

    possible = range(min(_MAX_STAGES, _MAX_STAGES_BYTES // stage_bytes), _MIN_STAGES - 1, -1)
    at_once = next((stages for stages in possible if rounds(stages) <= 1), None)
    return at_once or max(
        possible, key=lambda stages: (round(rounds(stages) / ceil(rounds(stages)), 3), -rounds(stages))
    )
