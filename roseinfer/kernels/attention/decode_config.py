"""What the kernel of `decode_attention` is compiled for, by heads and dtype, as measured."""

from dataclasses import dataclass

import torch

from roseinfer.kernels.attention.paged import padded_dim


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """What a decode kernel is compiled for.

    tile: tokens of K and V that a program loads at a time. form: how scores are computed, see `decode_forms`.
    shares_per_processor: programs that a multiprocessor runs at once. least_tiles: no share is smaller, since to merge
    shares takes longer than a few tiles.
    """

    form: int
    tile: int
    num_warps: int
    num_stages: int
    shares_per_processor: int
    least_tiles: int


ELEMENTWISE, MATRIX, TOKENS = 0, 1, 2


def choose_decode_config(group: int, head_dim: int, dtype: torch.dtype, fp8: bool = False) -> DecodeConfig:
    """For `group` query heads a KV head. fp8: K and V are kept in it.

    Chosen by a sweep over forms, tiles, warps, stages and shares in bfloat16 (H200, 2026-11-21; attention kernels only,
    in CUDA graphs, over more K and V than the L2 cache holds). Heads / KV heads / head size, then GB/s of K and V for
    256 rows of 100 to 2048 tokens and for 64 rows of 1024, and us for 8 rows of 1024 and for one row of 200:

        32/8/128  matrix, tiles of 64, 2 shares       4175  3878  14.7  7.5
        16/8/128  the same                            4225  3931  14.4  7.3
        12/12/64  elementwise, tiles of 64, 3 shares  4194  3690  12.4  5.4
                  matrix, tiles of 128, 3 shares      4173  3709  13.0  5.5

    The matrix form pads any group of up to 16 heads to 16, so that smaller groups cost the same. Shares of 64 tokens or
    more, instead of 256, help one short row (first line, with 3 shares: 5.9 us instead of 7.2) and slow 8 rows of 1024
    down (17.4 instead of 14.8). Heads of more than 128, and float32, have tiles of about as many bytes; they were not
    measured.

    In FP8, 32/8/128 (2026-11-23): GB/s for 256 rows of 1024 and of 675 tokens, for 256 ragged ones and 64 of 1024:

        tokens, tiles of 32, 1 warp, 3 stages, 8 shares    3710  3459  3416  3224
        tokens, tiles of 64, 2 warps, 3 stages, 4 shares   3462  3188  3171  3218
        matrix, tiles of 64, 2 warps, 3 stages, 4 shares   3209  2931  2941  2964
        matrix, tiles of 64, 4 warps, 3 stages, 3 shares   2844  2592  2534  2444
        matrix, tiles of 64, 4 warps, 3 stages, 2 shares, 16 bits: 4273  4135  3658  3877

    Half the bytes need as many instructions: heads padded to 8 only halve some of them, and a lone warp waits for no
    other. In 16 bits the tokens form is a sixth slower than the matrix form. Other heads have tiles of as many bytes.
    """
    if dtype == torch.float32:
        tile = 32 if head_dim <= 128 else 16
        return DecodeConfig(ELEMENTWISE if group == 1 else MATRIX, tile, 4, 3, 2, 128 // tile)
    if fp8:
        return DecodeConfig(TOKENS, max(16, min(64, 32 * 128 // padded_dim(head_dim))), 1, 3, 8, 8)
    if group == 1 and head_dim <= 64:
        return DecodeConfig(ELEMENTWISE, 64, 4, 3, 3, 4)
    if head_dim <= 64:
        return DecodeConfig(MATRIX, 128, 4, 3, 3, 2)
    if head_dim <= 128:
        return DecodeConfig(MATRIX, 64, 4, 3, 2, 4)
    return DecodeConfig(MATRIX, 32, 4, 3, 2, 8)
