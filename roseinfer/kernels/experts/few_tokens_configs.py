"""Configs of `experts_few`, by rule."""

from dataclasses import dataclass

from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class GateUpConfig:
    """Division of gate and up: a program takes `tiles` tiles of `block_n` outputs (of each) of one expert in turn.

    block_k: columns in registers at once, a power of two. stages: 1, or one more than the tiles being copied into
    shared memory. lanes: threads of a warp that read the same row, a power of two, at least 32 / block_n; with scales
    by blocks at most 8.
    """

    block_n: int
    tiles: int
    block_k: int = 2048
    warps: int = 4
    stages: int = 1
    lanes: int = 32


@dataclass(frozen=True, slots=True)
class DownConfig:
    """Division of down: a program takes `block_n` outputs of a token.

    block_k: columns of each expert at a time, a power of two. ahead: number of such loads of the weight before the wait
    for its input.
    """

    block_n: int
    ahead: int
    block_k: int = 256
    warps: int = 4


@dataclass(frozen=True, slots=True)
class FewConfig:
    """Division of a layer's products. evict_first: mark weights as the first to leave the L2 cache."""

    gate_up: GateUpConfig
    down: DownConfig
    evict_first: bool = False


# For weights in 16 bits, and for codes: programs of gate and up that an H200 runs, and their fewest and most outputs
# per tile.
_PROGRAMS = 1024, 512
_BLOCK_N = (2, 4), (8, 16)
# A program with more tiles than these gets wider ones, and at most so many of the widest.
_MAX_NARROW_TILES, _MAX_TILES = 6, 12


# The largest blocks that divide a width of 2,880 have 64 columns. With masked ones of 1,024 a layer of gpt-oss-20b
# takes 41 us for one token on an H200 instead of 65 (found by a random search; torch 2.11, Triton 3.6; 2026-11-27).
_MXFP4_DOWN = DownConfig(8, ahead=1, block_k=1024)
# Most tiles of a program of gate and up in MXFP4, each of the fewest outputs. With 8 lanes four tokens of gpt-oss-20b
# take 100 us for a layer instead of 143 with twice as wide tiles and 16 lanes (2026-11-28).
_MAX_MXFP4_TILES = 5


def choose_few_config(tokens: int, top_k: int, hidden: int, width: int, scaled: str) -> FewConfig:
    """Return the config for a layer of experts.

    A search at 1, 2, 4, 8 and 16 tokens of Qwen3-30B-A3B on an H200 (torch 2.11, Triton 3.6; 2026-11-23) found it to be
    the fastest or within 1% of it; 16 tokens in 16 bits are left to tiles. Other shapes follow the same rule.
    """
    narrow, pairs, mxfp4 = scaled != "none", tokens * top_k, scaled == "mxfp4"
    block_n, widest = _BLOCK_N[narrow]
    wanted = pairs * cdiv(width, block_n) // _PROGRAMS[narrow]
    if mxfp4:
        wanted = min(wanted, _MAX_MXFP4_TILES)
    elif wanted > _MAX_NARROW_TILES:
        block_n, wanted = widest, wanted * block_n // widest
    slices = cdiv(width, block_n)
    tiles = max(1, min(_MAX_NARROW_TILES if tokens <= 8 else _MAX_TILES, wanted))
    while slices % tiles:
        tiles -= 1
    # A width such as 2,880 leaves less of a smaller block empty.
    widest_k, narrowest_k = (1024, 512) if mxfp4 else (2048, 128)
    across = min(widest_k, max(narrowest_k, next_power_of_2(hidden)))
    return FewConfig(
        GateUpConfig(block_n, tiles, block_k=across, lanes=8 if narrow else 32),
        _MXFP4_DOWN if mxfp4 else _choose_down(tokens, pairs, top_k, width, narrow),
        evict_first=True,
    )


def _choose_down(tokens: int, pairs: int, top_k: int, width: int, narrow: bool) -> DownConfig:
    """Return how down is divided: the more programs there are, the less each of them holds in registers."""
    along = min(2048 // next_power_of_2(top_k), next_power_of_2(width))
    if pairs >= (64 if narrow else 16) and along > 128:
        along //= 2
    while along > 128 and width % along:
        along //= 2
    if not narrow:
        return DownConfig(4, ahead=2, block_k=along)
    return DownConfig(8, ahead=3 if tokens == 1 else 1 if pairs >= 128 else 2, block_k=along)
