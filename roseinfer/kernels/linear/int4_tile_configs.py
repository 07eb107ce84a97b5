"""Configs of `int4_tile_product`, for weights that `int4_bulk` does not support: by a rule, none was measured."""

from bisect import bisect_left

from roseinfer.kernels.common.triton_support import cdiv
from roseinfer.kernels.linear.fp8_tile_configs import TileConfig

# Numbers of rows that are compiled separately, each for all numbers up to it.
BUCKETS = (16, 32, 64, 128)
MAX_ROWS = BUCKETS[-1]
_MIN_PROGRAMS = 128
_SHARES = (1, 2, 3, 4, 6, 8)


def choose_int4_tile_config(rows: int, outs: int, columns: int) -> TileConfig | None:
    """Return the config for `rows` rows and a weight of [outs, columns]; None if the library has to multiply.

    Tiles get shares of the columns until every multiprocessor has some.
    """
    if rows > MAX_ROWS:
        return None
    bucket = BUCKETS[bisect_left(BUCKETS, rows)]
    block_m = min(bucket, 64)
    tiles = cdiv(outs, 64) * cdiv(bucket, block_m)
    possible = [shares for shares in _SHARES if cdiv(columns, 128) % shares == 0]
    shares = next((shares for shares in possible if tiles * shares >= _MIN_PROGRAMS), possible[-1])
    return TileConfig(block_m, 64, 128, shares, 4, 4, weight_first=True)
