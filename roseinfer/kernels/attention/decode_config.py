"""Configs of the kernel of `decode_attention`, by heads and dtype: measured ones, and the rule for others."""

from dataclasses import dataclass
from pathlib import Path

import torch

from roseinfer.kernels.attention.paged import padded_dim
from roseinfer.kernels.common.tuning import TuningTable


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Constants that a decode kernel is compiled for.

    tile: tokens of K and V that a program loads at a time. form: how scores are computed, see `decode_forms`.
    shares_per_processor: programs that a multiprocessor runs at once. least_tiles: the smallest share of a context;
    merging smaller shares takes longer than a few tiles.
    """

    form: int
    tile: int
    num_warps: int
    num_stages: int
    shares_per_processor: int
    least_tiles: int


ELEMENTWISE, MATRIX, TOKENS = 0, 1, 2


TABLE: TuningTable[DecodeConfig] = TuningTable(
    Path(__file__).with_name("tuning") / "decode.json",
    {"kv": str, "max_head_dim": int, "grouped": bool},
    {"decode": DecodeConfig},
)
# Head sizes that were measured; smaller heads in 16 bits take the config of the next larger size.
_HEAD_DIMS = (64, 128)


def choose_decode_config(group: int, head_dim: int, dtype: torch.dtype, fp8: bool = False) -> DecodeConfig:
    """Return the config for `group` query heads per KV head. fp8: K and V are stored in it."""
    if dtype == torch.float32:
        tile = 32 if head_dim <= 128 else 16
        return DecodeConfig(ELEMENTWISE if group == 1 else MATRIX, tile, 4, 3, 2, 128 // tile)
    if fp8:
        return TABLE.choose(("fp8", head_dim, group > 1), _unmeasured)
    largest = next((size for size in _HEAD_DIMS if head_dim <= size), head_dim)
    return TABLE.choose(("16 bits", largest, group > 1), _unmeasured)


def _unmeasured(kv: str, head_dim: int, grouped: bool) -> DecodeConfig:
    """Return a config whose tiles have about as many bytes as the measured ones."""
    if kv == "fp8":
        return DecodeConfig(TOKENS, max(16, min(64, 32 * 128 // padded_dim(head_dim))), 1, 3, 8, 8)
    if head_dim <= 128:
        return DecodeConfig(MATRIX, 64, 4, 3, 2, 4)
    return DecodeConfig(MATRIX, 32, 4, 3, 2, 8)
