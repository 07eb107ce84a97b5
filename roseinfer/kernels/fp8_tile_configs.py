"""How `tile_product` cuts its work, by shape: measured where a shape was measured, else by rule."""

from dataclasses import dataclass

from roseinfer.kernels.triton_support import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the work is cut. It decides speed, and the order of a sum's terms.

    block_m: rows of the input of a tile, a power of two; at least 16, or 64 unless `weight_first`. block_n: rows of the
    weight, at least 64 if `weight_first`. block_k: columns taken at a time, 128 with scales by blocks. shares: programs
    that divide a tile's columns among them. stages: how many blocks of columns are on their way. weight_first: the
    weight's rows are the long side of the matrix units, so that few rows of the input do not leave them idle.
    """

    block_m: int
    block_n: int
    block_k: int
    shares: int
    warps: int
    stages: int
    weight_first: bool


# More rows than that are the library's: by channels, and by blocks, whose sums are scaled one block after the other.
MAX_ROWS, MAX_BLOCK_ROWS = 256, 64
# Programs that keep an H200's memory busy: about one for each of its multiprocessors.
_LEAST_PROGRAMS = 128
_SHARES = (1, 2, 3, 4, 6, 8)

# (rows up to, weight rows, columns, scales by blocks)
Shape = tuple[int, int, int, bool]
MEASURED: dict[Shape, TileConfig | None] = {}


def choose_tile_config(rows: int, outs: int, columns: int, *, blocks: bool) -> TileConfig | None:
    """The config for `rows` rows and a weight of [outs, columns]; None if the library is faster or has to do it."""
    if not 1 <= rows <= (MAX_BLOCK_ROWS if blocks else MAX_ROWS) or columns % 128:
        return None
    shape = (next_power_of_2(max(rows, 16)), outs, columns, blocks)
    return MEASURED[shape] if shape in MEASURED else rule(*shape)


def rule(bucket: int, outs: int, columns: int, blocks: bool) -> TileConfig | None:
    """Shares of the columns until every multiprocessor has some. Many tiles of many rows are the library's."""
    weight_first = bucket <= 64
    block_m, block_k = min(bucket, 64), 256 if columns % 256 == 0 and not blocks else 128
    tiles = cdiv(outs, 64) * cdiv(bucket, block_m)
    if not weight_first and tiles > 2 * _LEAST_PROGRAMS:
        return None
    possible = [shares for shares in _SHARES if columns // block_k % shares == 0]
    shares = next((shares for shares in possible if tiles * shares >= _LEAST_PROGRAMS), possible[-1])
    return TileConfig(block_m, 64, block_k, shares, 4, 4, weight_first)
