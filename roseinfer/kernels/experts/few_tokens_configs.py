"""Configs of `experts_few`, by rule."""

from dataclasses import dataclass, replace
from typing import NamedTuple

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


class _Mxfp4Cut(NamedTuple):
    """Division in MXFP4: outputs per tile of gate and up, most tiles of a program, its warps, programs that an H200
    runs, and loads of down ahead.
    """

    block_n: int
    most_tiles: int
    warps: int
    programs: int
    ahead: int


# With so many pairs of token and expert at most, and with more.
_MAX_WIDE_MXFP4_PAIRS = 8
_WIDE_MXFP4_CUT, _NARROW_MXFP4_CUT = _Mxfp4Cut(16, 6, 8, 240, 2), _Mxfp4Cut(8, 3, 4, 384, 1)
# For weights in int4: outputs per tile of gate and up. For both kinds of four bits: the columns of all experts of a
# token that a program of down takes at once.
_INT4_BLOCK_N, _FOUR_BIT_COLUMNS = 16, 4096
# For weights in 16 bits, and for codes: programs of gate and up that an H200 runs, and their fewest and most outputs
# per tile.
_PROGRAMS = 1024, 512
_BLOCK_N = (2, 4), (8, 16)
# Tiles of so many outputs, in programs of so many warps, where this leaves so many programs and the narrowest tiles are
# no more than run at once: with scales by blocks, one token of Qwen3.6-35B-A3B takes 15.9 us a layer instead of 17.0
# (H200, torch 2.11, Triton 3.6; 2026-11-28).
_WIDE_BLOCK_N, _WIDE_WARPS, _MIN_WIDE_PROGRAMS = 16, 8, 256
# A program with more tiles than these gets wider ones, and at most so many of the widest.
_MAX_NARROW_TILES, _MAX_TILES = 6, 12


def choose_few_config(tokens: int, top_k: int, hidden: int, width: int, scaled: str) -> FewConfig:
    """Return the config for a layer of experts.

    A search at 1, 2, 4, 8 and 16 tokens of Qwen3-30B-A3B on an H200 (torch 2.11, Triton 3.6; 2026-11-23) found it to be
    the fastest or within 1% of it; 16 tokens in 16 bits are left to tiles. Other shapes follow the same rule.
    """
    narrow, pairs = scaled != "none", tokens * top_k
    if scaled in ("mxfp4", "int4", "nvfp4"):
        gate_up = _four_bit_gate_up(pairs, hidden, width, scaled)
        return FewConfig(gate_up, _four_bit_down(pairs, top_k, width, scaled), evict_first=True)
    block_n, widest = _BLOCK_N[narrow]
    wanted = pairs * cdiv(width, block_n) // _PROGRAMS[narrow]
    if wanted > _MAX_NARROW_TILES:
        block_n, wanted = widest, wanted * block_n // widest
    tiles = _divisor(cdiv(width, block_n), min(_MAX_NARROW_TILES if tokens <= 8 else _MAX_TILES, wanted))
    across, lanes = min(2048, max(128, next_power_of_2(hidden))), 8 if narrow else 32
    gate_up = GateUpConfig(block_n, tiles, block_k=across, lanes=lanes)
    are_few = pairs * cdiv(width, block_n) <= _PROGRAMS[narrow]
    if scaled == "block" and are_few and pairs * cdiv(width, _WIDE_BLOCK_N) >= _MIN_WIDE_PROGRAMS:
        gate_up = replace(gate_up, block_n=_WIDE_BLOCK_N, warps=_WIDE_WARPS)
    return FewConfig(
        gate_up,
        _choose_down(tokens, pairs, top_k, width, narrow),
        evict_first=True,
    )


def _divisor(whole: int, most: int) -> int:
    """Return the largest divisor of `whole` up to `most`, or 1."""
    return next(number for number in range(max(1, most), 0, -1) if whole % number == 0)


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


def _four_bit_gate_up(pairs: int, hidden: int, width: int, scaled: str) -> GateUpConfig:
    """Return how gate and up are divided for weights in four bits.

    For int4, of five divisions at 1, 2, 4 and 8 tokens of gpt-oss-20b's and Qwen3-30B-A3B's shapes, it is the fastest
    or within 6% of it; for MXFP4, of 23 at 1, 2, 3, 4 and 8 tokens of gpt-oss-20b's shape, within 6% (H200, torch 2.11,
    Triton 3.6; 2026-11-28). A width such as 2,880 leaves less of a smaller block of columns empty.
    """
    across = min(1024, max(512, next_power_of_2(hidden)))
    if scaled != "mxfp4":
        return GateUpConfig(_INT4_BLOCK_N, 1, block_k=across, lanes=8)
    cut = _mxfp4_cut(pairs)
    slices = cdiv(width, cut.block_n)
    tiles = _divisor(slices, min(cut.most_tiles, pairs * slices // cut.programs))
    return GateUpConfig(cut.block_n, tiles, block_k=across, warps=cut.warps, lanes=8)


def _mxfp4_cut(pairs: int) -> _Mxfp4Cut:
    return _WIDE_MXFP4_CUT if pairs <= _MAX_WIDE_MXFP4_PAIRS else _NARROW_MXFP4_CUT


def _four_bit_down(pairs: int, top_k: int, width: int, scaled: str) -> DownConfig:
    """Return how down is divided for weights in four bits.

    The largest blocks that divide a width of 2,880 have 64 columns, so blocks may be masked.
    """
    along = _FOUR_BIT_COLUMNS // next_power_of_2(top_k)
    if width % along and width % (along // 2) == 0:
        along //= 2
    return DownConfig(8, ahead=_mxfp4_cut(pairs).ahead if scaled == "mxfp4" else 1, block_k=along)
