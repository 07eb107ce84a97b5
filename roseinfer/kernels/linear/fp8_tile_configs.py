"""How `tile_product` cuts its work, by shape: measured where a shape was measured, else by rule."""

from bisect import bisect_left
from dataclasses import dataclass

from roseinfer.kernels.common.triton_support import cdiv


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the work is cut. It decides speed, and the order of a sum's terms.

    block_m: rows of the input of a tile, a power of two; at least 16, or 64 unless `weight_first`. block_n: rows of the
    weight, at least 64 if `weight_first`. block_k: columns taken at a time, 128 with scales by blocks. shares: programs
    that divide a tile's columns among them. stages: how many blocks of columns are on their way. weight_first: the
    weight's rows are the long side of the matrix units, so that few rows of the input do not leave them idle. ahead: a
    program's part of the weight is read before its input is there, all of it at once, whatever `stages` says; only
    where the weight is first, and the part fits shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    shares: int
    warps: int
    stages: int
    weight_first: bool
    ahead: bool = False


# Numbers of rows that are compiled and measured apart, each for all up to it. Of shapes that were not measured the
# first are ours, more are the library's.
BUCKETS = (16, 32, 64, 128, 192, 256, 384, 576, 832, 1088)
MAX_ROWS, RULED_ROWS = BUCKETS[-1], 256
# Programs that keep an H200's memory busy: about one for each of its multiprocessors.
_LEAST_PROGRAMS = 128
_SHARES = (1, 2, 3, 4, 6, 8)

# (rows up to, weight rows, columns, scales by blocks)
Shape = tuple[int, int, int, bool]
# Fastest on an H200 (torch 2.11, CUDA 13.0, Triton 3.6; 2026-11-23), each with weights that come from memory, those of
# 4,096 outputs with a residual; None where cuBLAS is faster, though it takes a kernel of its own to add a residual.
# Those without a time were chosen in a chain of layers with attention. Programs of a kernel that starts early go where
# there is room just then, so shared memory (`stages`) has to keep them from crowding on a few multiprocessors.
MEASURED: dict[Shape, TileConfig | None] = {
    # Qwen3-8B, scales by channels
    (16, 6144, 4096, False): TileConfig(16, 64, 256, 1, 4, 4, True),  # 9.0 us, cuBLAS 13.4
    (32, 6144, 4096, False): TileConfig(32, 64, 256, 1, 4, 4, True),  # 9.3 us, cuBLAS 13.5
    (64, 6144, 4096, False): TileConfig(64, 64, 256, 1, 4, 4, True),  # 9.7 us, cuBLAS 13.6
    (128, 6144, 4096, False): TileConfig(64, 64, 128, 1, 4, 6, False),  # 11.5 us, cuBLAS 13.6
    (192, 6144, 4096, False): TileConfig(64, 128, 128, 1, 4, 4, False),  # 13.8 us, cuBLAS 14.0
    (256, 6144, 4096, False): None,  # 14.3 us, cuBLAS 14.0
    (16, 4096, 4096, False): TileConfig(16, 64, 256, 2, 4, 4, True),  # 7.4 us, cuBLAS 14.3
    (32, 4096, 4096, False): TileConfig(16, 64, 256, 1, 4, 4, True),  # 7.8 us, cuBLAS 14.3
    (64, 4096, 4096, False): TileConfig(64, 64, 256, 2, 4, 4, True),  # 8.9 us, cuBLAS 14.3
    (128, 4096, 4096, False): TileConfig(64, 64, 256, 1, 4, 4, False),  # 8.7 us, cuBLAS 14.6
    (192, 4096, 4096, False): TileConfig(64, 64, 128, 1, 4, 6, False),  # 10.2 us
    (256, 4096, 4096, False): TileConfig(64, 64, 128, 1, 4, 6, False),  # 10.9 us, cuBLAS 15.1
    (16, 24576, 4096, False): TileConfig(16, 64, 256, 1, 4, 3, True),  # 26.6 us, cuBLAS 34.9
    (32, 24576, 4096, False): TileConfig(32, 64, 256, 1, 4, 3, True),  # 27.2 us, cuBLAS 39.7
    (64, 24576, 4096, False): TileConfig(64, 64, 128, 1, 4, 4, True),  # 28.8 us, cuBLAS 36.2
    (128, 24576, 4096, False): TileConfig(64, 128, 128, 1, 4, 3, False),  # 30.9 us, cuBLAS 34.3
    (192, 24576, 4096, False): TileConfig(64, 128, 128, 1, 4, 3, False),  # 44.5 us, cuBLAS 51.3
    (256, 24576, 4096, False): None,  # 49.0 us, cuBLAS 42.3
    (16, 4096, 12288, False): TileConfig(16, 64, 256, 4, 4, 4, True),  # 16.4 us, cuBLAS 35.2
    (32, 4096, 12288, False): TileConfig(32, 64, 256, 2, 4, 4, True),  # 17.9 us, cuBLAS 33.3
    (64, 4096, 12288, False): TileConfig(64, 64, 256, 2, 4, 4, True),  # 18.6 us, cuBLAS 33.6
    (128, 4096, 12288, False): TileConfig(64, 64, 256, 1, 4, 4, False),  # 21.6 us, cuBLAS 33.8
    (192, 4096, 12288, False): TileConfig(64, 64, 128, 1, 4, 6, False),  # 25.8 us
    (256, 4096, 12288, False): TileConfig(64, 64, 128, 1, 4, 6, False),  # 27.5 us, cuBLAS 34.7
    # Qwen3-8B, scales by blocks
    (16, 6144, 4096, True): TileConfig(16, 64, 128, 4, 4, 6, True),  # 9.5 us, cuBLAS 14.3
    (32, 6144, 4096, True): TileConfig(32, 64, 128, 4, 4, 6, True),  # 10.5 us, cuBLAS 14.3
    (64, 6144, 4096, True): TileConfig(64, 64, 128, 1, 4, 6, False),  # 12.3 us, cuBLAS 14.4
    (128, 6144, 4096, True): TileConfig(64, 64, 128, 1, 4, 6, False),  # 13.0 us, cuBLAS 14.7
    (192, 6144, 4096, True): None,  # 15.5 us, cuBLAS 14.9
    (256, 6144, 4096, True): None,  # 17.1 us, cuBLAS 15.0
    (16, 4096, 4096, True): TileConfig(16, 64, 128, 4, 4, 8, True),  # cuBLAS 15.1 us
    (32, 4096, 4096, True): TileConfig(32, 64, 128, 4, 4, 4, True),  # 9.4 us, cuBLAS 15.2
    (64, 4096, 4096, True): TileConfig(64, 64, 128, 2, 4, 6, False),  # 9.9 us, cuBLAS 15.3
    (128, 4096, 4096, True): TileConfig(64, 64, 128, 2, 4, 6, False),  # 11.3 us, cuBLAS 15.7
    (192, 4096, 4096, True): TileConfig(64, 64, 128, 1, 4, 6, False),  # 13.0 us
    (256, 4096, 4096, True): TileConfig(64, 64, 128, 1, 4, 6, False),  # 12.9 us, cuBLAS 16.2
    (16, 24576, 4096, True): TileConfig(16, 64, 128, 1, 4, 6, True),  # 27.8 us, cuBLAS 34.7
    (32, 24576, 4096, True): TileConfig(32, 64, 128, 1, 4, 6, True),  # 28.5 us, cuBLAS 35.9
    (64, 24576, 4096, True): TileConfig(64, 64, 128, 1, 4, 4, False),  # 28.7 us, cuBLAS 35.9
    (128, 24576, 4096, True): None,  # 38.9 us, cuBLAS 33.6
    (192, 24576, 4096, True): None,  # 51.3 us, cuBLAS 51.0
    (256, 24576, 4096, True): None,  # 60.6 us, cuBLAS 45.7
    (16, 4096, 12288, True): TileConfig(16, 64, 128, 6, 4, 6, True),  # cuBLAS 23.1 us
    (32, 4096, 12288, True): TileConfig(32, 64, 128, 3, 4, 6, True),  # 19.2 us, cuBLAS 37.0
    (64, 4096, 12288, True): TileConfig(64, 64, 128, 2, 4, 6, False),  # 21.0 us, cuBLAS 37.2
    (128, 4096, 12288, True): TileConfig(64, 64, 128, 2, 4, 6, False),  # 22.7 us, cuBLAS 37.6
    (192, 4096, 12288, True): TileConfig(64, 128, 128, 2, 4, 4, False),  # 31.0 us
    (256, 4096, 12288, True): TileConfig(64, 128, 128, 2, 4, 4, False),  # 33.1 us, cuBLAS 38.7
    # Qwen3-30B-A3B, scales by blocks, in a chain of layers at contexts of 600 tokens
    (16, 5120, 2048, True): TileConfig(16, 64, 128, 2, 8, 0, True, True),
    (32, 5120, 2048, True): TileConfig(32, 64, 128, 2, 4, 0, True, True),
    (64, 5120, 2048, True): TileConfig(64, 64, 128, 2, 4, 6, False),
    (128, 5120, 2048, True): TileConfig(64, 64, 128, 1, 4, 6, False),
    (192, 5120, 2048, True): TileConfig(64, 64, 128, 1, 4, 6, False),
    (256, 5120, 2048, True): None,
    (576, 5120, 2048, True): TileConfig(64, 128, 128, 1, 4, 3, False),
    (832, 5120, 2048, True): TileConfig(64, 128, 128, 1, 4, 4, False),
    (16, 2048, 4096, True): TileConfig(16, 64, 128, 4, 4, 0, True, True),
    (32, 2048, 4096, True): TileConfig(16, 64, 128, 4, 4, 0, True, True),
    (64, 2048, 4096, True): TileConfig(32, 64, 128, 4, 8, 0, True, True),
    (128, 2048, 4096, True): TileConfig(64, 64, 128, 2, 4, 8, False),
    (192, 2048, 4096, True): TileConfig(64, 64, 128, 1, 4, 8, False),
    (256, 2048, 4096, True): TileConfig(64, 64, 128, 1, 4, 8, False),
    (384, 2048, 4096, True): TileConfig(128, 64, 128, 1, 4, 6, False),
    (576, 2048, 4096, True): TileConfig(64, 64, 128, 1, 4, 4, False),
    (1088, 2048, 4096, True): TileConfig(64, 128, 128, 1, 4, 3, False),
}


def choose_tile_config(rows: int, outs: int, columns: int, *, blocks: bool) -> TileConfig | None:
    """The config for `rows` rows and a weight of [outs, columns]; None if the library is faster or has to do it."""
    if not 1 <= rows <= MAX_ROWS or columns % 128:
        return None
    shape = (BUCKETS[bisect_left(BUCKETS, rows)], outs, columns, blocks)
    return MEASURED[shape] if shape in MEASURED else rule(*shape)


def rule(bucket: int, outs: int, columns: int, blocks: bool) -> TileConfig | None:
    """Shares of the columns until every multiprocessor has some. Many tiles of many rows are the library's."""
    if bucket > RULED_ROWS:
        return None
    weight_first = bucket <= (32 if blocks else 64)
    block_m, block_k = min(bucket, 64), 256 if columns % 256 == 0 and not blocks else 128
    tiles = cdiv(outs, 64) * cdiv(bucket, block_m)
    if bucket > 64 and tiles > 2 * _LEAST_PROGRAMS:
        return None
    possible = [shares for shares in _SHARES if columns // block_k % shares == 0]
    shares = next((shares for shares in possible if tiles * shares >= _LEAST_PROGRAMS), possible[-1])
    return TileConfig(block_m, 64, block_k, shares, 4, 4, weight_first)
