"""How the products of `experts_tiles` cut their work, by the number of rows that an expert gets on average."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Cut:
    """block_n: outputs of a program, at least 64 if the weight is first; 128 for what is written as codes. block_k:
    columns taken at a time, 128 of codes. stages: how many blocks of columns are on their way."""

    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """It decides speed, and the order of a sum's terms.

    tile: rows of a tile, a power of two; at least 16, or 64 unless `weight_first`. weight_first: the weight's rows are
    the long side of the matrix units. spread: the rows of tokens are copied to where they are sorted before they are
    multiplied, which takes bulk copies and as many copies as a token has experts; else each program gathers its own.
    """

    tile: int
    weight_first: bool
    spread: bool
    gate_up: Cut
    down: Cut

    @property
    def halves(self) -> bool:
        """Of a tile whose second half is empty, an expert's last one, only the first is computed: where tiles are so
        large that a half still fills the matrix units. 2% of a layer of 4,096 or 8,192 tokens in 16 bits."""
        return self.tile >= 128 and not self.weight_first and not self.spread


# Rows of an expert on average, up to which a config serves: the fastest for Qwen3-30B-A3B (2,048 columns, width 768,
# 128 experts of which a token has 8, scales by blocks) on an H200 (torch 2.11, Triton 3.6; 2026-11-23), measured at .5,
# 1, 2, 4, 8, 16, 32, 128 and 512.
_WIDE: tuple[tuple[float, ExpertsConfig], ...] = (
    (10, ExpertsConfig(16, True, False, Cut(64, 128, 4, 3), Cut(128, 64, 4, 3))),
    (24, ExpertsConfig(32, True, False, Cut(64, 64, 4, 3), Cut(64, 64, 4, 3))),
    (56, ExpertsConfig(64, False, False, Cut(64, 64, 4, 3), Cut(128, 64, 8, 3))),
    (256, ExpertsConfig(128, False, False, Cut(128, 64, 8, 4), Cut(256, 64, 8, 4))),
    (float("inf"), ExpertsConfig(128, False, False, Cut(128, 64, 8, 4), Cut(128, 64, 8, 3))),
)
_CODES: tuple[tuple[float, ExpertsConfig], ...] = (
    (3, ExpertsConfig(16, True, False, Cut(128, 128, 4, 3), Cut(128, 128, 4, 3))),
    (10, ExpertsConfig(16, True, False, Cut(128, 128, 4, 3), Cut(128, 128, 4, 2))),
    (24, ExpertsConfig(32, True, False, Cut(128, 128, 4, 3), Cut(64, 128, 4, 3))),
    (56, ExpertsConfig(64, False, False, Cut(128, 128, 8, 5), Cut(128, 128, 4, 3))),
    (256, ExpertsConfig(64, False, False, Cut(128, 128, 8, 4), Cut(128, 128, 4, 3))),
    (float("inf"), ExpertsConfig(64, False, False, Cut(128, 128, 8, 3), Cut(128, 128, 4, 3))),
)
# Rows of an expert, and outputs of one, from which copying rows to where they are sorted is expected to pay: with 512
# rows of width 768 it takes 108 us (FP8: 61) and saves gate and up 80 (46), which grows with the width.
_SPREAD_ROWS, _SPREAD_WIDTH = 256, 1536


def choose_experts_config(tokens: int, top_k: int, experts: int, width: int, *, codes: bool) -> ExpertsConfig:
    """For `tokens` tokens that each choose `top_k` of `experts` of `width`, weights of codes or in 16 bits."""
    rows = tokens * top_k / experts
    config = next(config for most, config in (_CODES if codes else _WIDE) if rows <= most)
    return replace(config, spread=rows > _SPREAD_ROWS and width >= _SPREAD_WIDTH)
