"""How `experts_few` cuts its work."""

from dataclasses import dataclass

from roseinfer.kernels.triton_support import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class GateUpCut:
    """A program takes `tiles` tiles of `block_n` outputs (of gate and up each) of one expert, one after the other.

    block_k: columns that are in registers at once, a power of two. stages: 1, or one more than the tiles that are on
    their way into shared memory. lanes: threads of a warp that read the same row, a power of two, at least
    32 / block_n; with scales by blocks at most 8.
    """

    block_n: int
    tiles: int
    block_k: int = 2048
    warps: int = 4
    stages: int = 1
    lanes: int = 32


@dataclass(frozen=True, slots=True)
class DownCut:
    """A program takes `block_n` outputs of a token.

    block_k: columns of each expert at a time, a power of two. ahead: so many times that is read before what it is
    multiplied by is there.
    """

    block_n: int
    ahead: int
    block_k: int = 256
    warps: int = 4


@dataclass(frozen=True, slots=True)
class FewConfig:
    """evict_first: mark weights as the first to leave the L2 cache."""

    gate_up: GateUpCut
    down: DownCut
    evict_first: bool = False


# Programs of gate and up that an H200 runs at once, four for each multiprocessor, so that each multiprocessor chooses
# experts once and down's programs start while those of gate and up still read.
_PROGRAMS = 512
_MOST_TILES = 6


def choose_few_config(tokens: int, top_k: int, hidden: int, width: int, scaled: str) -> FewConfig:
    """By reasoning, not measured yet: tiles of 32 KiB, as many after each other as leave `_PROGRAMS`; down's first 48
    KiB in registers."""
    narrow = scaled != "none"  # half the bytes, so twice the rows
    block_n = 8 if narrow else 4
    across = min(2048, max(128, next_power_of_2(hidden)))
    along = min(2048 // next_power_of_2(top_k), next_power_of_2(width))
    while along > 128 and width % along:
        along //= 2
    slices = cdiv(width, block_n)
    tiles = max(1, min(_MOST_TILES, round(tokens * top_k * slices / _PROGRAMS)))
    while slices % tiles:
        tiles -= 1
    return FewConfig(
        GateUpCut(block_n, tiles, block_k=across, lanes=8 if narrow else 32),
        DownCut(block_n, ahead=3, block_k=along),
        evict_first=tokens == 1,
    )
