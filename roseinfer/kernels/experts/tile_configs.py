"""Configs of the products of `tiles`, by the number of rows that an expert gets on average."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from roseinfer.kernels.common.tuning import TuningTable


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Division of one product.

    block_n: outputs of a program, at least 64 if the weight is first; 128 for results that are written as codes.
    block_k: columns taken at a time, 128 of codes. stages: blocks of columns being copied at a time.
    """

    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Division of a layer's products. It decides the speed, and the order of a sum's terms.

    tile: rows of a tile, a power of two; at least 16, or 64 unless `weight_first`. weight_first: the weight's rows are
    the long side of the matrix units. spread: copy each token's row to where its pairs are sorted before multiplying,
    else each program gathers its rows. Copies allow bulk loads, and take as many rows as a token has experts.
    """

    tile: int
    weight_first: bool
    spread: bool
    gate_up: ProductConfig
    down: ProductConfig

    @property
    def halves(self) -> bool:
        """True if only the first half of a tile is computed when its second half is empty.

        That is an expert's last tile. It pays where a half still fills the matrix units: 2% of a layer of 4,096 or
        8,192 tokens in 16 bits.
        """
        return self.tile >= 128 and not self.weight_first and not self.spread


TABLE: TuningTable[ExpertsConfig] = TuningTable(
    Path(__file__).with_name("tuning") / "tiles.json",
    {"codes": bool, "max_rows": int | None},
    {"tiles": ExpertsConfig},
)
# Copying rows to where they are sorted is expected to pay above so many rows of an expert, and outputs of one: with 512
# rows of width 768 it takes 108 us (FP8: 61) and saves gate and up 80 (46), which grows with the width.
_MIN_SPREAD_ROWS, _MIN_SPREAD_WIDTH = 256, 1536


# Configs for weights in four bits, by the most rows: of those measured at 8, 24, 64, 256 and 512 rows of gpt-oss-20b's
# experts, and in int4 at 1, 4, 16, 64 and 256 of Qwen3-30B-A3B's, the fastest or within 6% of it (H200, torch 2.11,
# Triton 3.6; 2026-11-28).
_CUT, _WIDE, _LONG = ProductConfig(64, 128, 4, 3), ProductConfig(128, 64, 4, 3), ProductConfig(64, 256, 4, 3)
_OF_FOUR_BITS = (
    (10, ExpertsConfig(16, True, False, _CUT, _LONG)),
    (24, ExpertsConfig(32, True, False, _CUT, _CUT)),
    (100, ExpertsConfig(64, True, False, _CUT, _WIDE)),
    (math.inf, ExpertsConfig(128, True, False, _CUT, _WIDE)),
)
# In int4 shorter cuts are 15% faster in the last case.
_OF_MANY_INT4 = replace(_OF_FOUR_BITS[-1][1], gate_up=ProductConfig(64, 64, 4, 3), down=ProductConfig(64, 64, 4, 3))


def choose_experts_config(
    tokens: int, top_k: int, experts: int, width: int, *, codes: bool, four_bits: str = ""
) -> ExpertsConfig:
    """Return the config for `tokens` tokens that each choose `top_k` of `experts` experts of `width`.

    codes: weights are in FP8; four_bits: "mxfp4", "int4" or "nvfp4"; else in 16 bits.
    """
    rows = tokens * top_k / experts
    if four_bits:
        config = next(config for max_rows, config in _OF_FOUR_BITS if rows <= max_rows)
        if four_bits == "int4" and config is _OF_FOUR_BITS[-1][1]:
            config = _OF_MANY_INT4
        return replace(config, spread=rows > _MIN_SPREAD_ROWS and width >= _MIN_SPREAD_WIDTH)
    config = next(
        config
        for (of_codes, max_rows), config in TABLE.entries.items()
        if of_codes == codes and (max_rows is None or rows <= max_rows)
    )
    return replace(config, spread=rows > _MIN_SPREAD_ROWS and width >= _MIN_SPREAD_WIDTH)
