"""How `experts_few` cuts its work."""

from dataclasses import dataclass

from roseinfer.kernels.triton_support import next_power_of_2


@dataclass(frozen=True, slots=True)
class GateUpCut:
    """A program takes `tiles` tiles of `block_n` outputs (of gate and up each) of one expert, one after the other.

    block_k: columns that are in registers at once, a power of two. stages: 1, or one more than the tiles that are on
    their way into shared memory.
    """

    block_n: int
    tiles: int
    block_k: int = 2048
    warps: int = 4
    stages: int = 1


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


def choose_few_config(tokens: int, top_k: int, hidden: int, width: int, scaled: str) -> FewConfig:
    """By reasoning, not measured yet: gate and up in programs of 32 KiB, four of which a multiprocessor holds; down's
    first 48 KiB in registers."""
    narrow = scaled != "none"  # half the bytes, so twice the rows
    across = min(2048, max(128, next_power_of_2(hidden)))
    along = min(2048 // next_power_of_2(top_k), next_power_of_2(width))
    while along > 128 and width % along:
        along //= 2
    return FewConfig(
        GateUpCut(block_n=8 if narrow else 4, tiles=1 if tokens == 1 else 2, block_k=across),
        DownCut(block_n=8 if narrow else 4, ahead=3, block_k=along),
        evict_first=tokens == 1,
    )
