"""How the products of `experts_tiles` cut their work, by the number of rows that an expert gets on average."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """block_n: outputs of a program, at least 64 if the weight is first; 128 for what is written as codes. block_k:
    columns taken at a time, 128 of codes. stages: how many blocks of columns are on their way. specialised: four more
    warps start the copies and multiply nothing; for 8 warps, a tile of 128 rows, its rows first, for gate and
    up spread."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    specialised: bool = False

    @property
    def launched_warps(self) -> int:
        """Of which the compiler makes three times as many: two groups that multiply half of a tile each, and one that
        copies."""
        return self.warps // 2 if self.specialised else self.warps


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


# Rows of an expert on average, up to which a config serves. Guesses from dense products on an H200; not measured.
_WIDE: tuple[tuple[float, ExpertsConfig], ...] = (
    (6, ExpertsConfig(16, True, False, Cut(128, 64, 4, 3), Cut(128, 64, 4, 4))),
    (24, ExpertsConfig(32, True, False, Cut(128, 64, 4, 3), Cut(128, 64, 4, 4))),
    (56, ExpertsConfig(64, False, False, Cut(128, 64, 4, 3), Cut(128, 64, 4, 4))),
    (float("inf"), ExpertsConfig(128, False, True, Cut(128, 64, 8, 4), Cut(128, 64, 8, 4))),
)
_CODES: tuple[tuple[float, ExpertsConfig], ...] = (
    (6, ExpertsConfig(16, True, False, Cut(128, 128, 4, 3), Cut(128, 128, 4, 4))),
    (24, ExpertsConfig(32, True, False, Cut(128, 128, 4, 3), Cut(128, 128, 4, 4))),
    (float("inf"), ExpertsConfig(64, False, True, Cut(128, 128, 8, 2), Cut(128, 128, 4, 4))),
)


def choose_experts_config(tokens: int, top_k: int, experts: int, *, codes: bool) -> ExpertsConfig:
    """For `tokens` tokens that each choose `top_k` of `experts`, weights of codes in 8 bits or in 16 bits."""
    rows = tokens * top_k / experts
    return next(config for most, config in (_CODES if codes else _WIDE) if rows <= most)
