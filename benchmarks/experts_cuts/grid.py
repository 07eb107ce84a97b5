"""The cuts that `experts_cuts` tries: values by axis, and what of them fits a multiprocessor."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from roseinfer.kernels.experts_few_configs import DownCut, GateUpCut
from roseinfer.kernels.experts_tile_configs import Cut

SHARED_BYTES = 226_000  # of the 227 KiB that a program may have: some go to what layouts are changed in
LEAST_SHARED_BYTES = 30_000
Axes = dict[str, tuple[int, ...]]

FEW_GATE_UP_CODES: Axes = {
    "tiles": (1, 2, 3, 4, 6, 8, 12),
    "block_n": (4, 8, 16),
    "stages": (1, 2, 3, 4),
    "warps": (2, 4, 8),
    "block_k": (512, 1024, 2048),
}
FEW_GATE_UP: Axes = FEW_GATE_UP_CODES | {"block_n": (2, 4, 8, 16), "lanes": (16, 32)}
FEW_DOWN: Axes = {
    "ahead": (0, 1, 2, 3, 4, 6),
    "block_n": (2, 4, 8, 16),
    "block_k": (128, 256),
    "warps": (2, 4, 8),
}
TILES_WIDE: Axes = {"stages": (2, 3, 4, 5, 6), "warps": (4, 8), "block_n": (64, 128, 256), "block_k": (64, 128)}
TILES_CODES: Axes = {"stages": (2, 3, 4, 5, 6), "warps": (4, 8)}
TILES_CODES_DOWN: Axes = TILES_CODES | {"block_n": (64, 128)}
# Of `route`: tokens and experts of a program, splits of the columns, columns, stages, warps.
ROUTE: tuple[tuple[int, int, int, int, int, int], ...] = (
    (16, 32, 4, 256, 3, 4),
    (32, 32, 4, 128, 3, 4),
    (64, 32, 4, 128, 2, 4),
    (64, 64, 4, 64, 3, 4),
    (64, 128, 4, 32, 3, 4),
    (64, 128, 2, 32, 3, 4),
    (128, 128, 2, 32, 4, 8),
)


class Way(NamedTuple):
    """The part of an `ExpertsConfig` that both products have in common."""

    tile: int
    weight_first: bool
    spread: bool

    def __str__(self) -> str:
        sides = "weight first" if self.weight_first else "rows first"
        return f"{self.tile} {sides} {'spread' if self.spread else 'gather'}"


WAYS = tuple(
    Way(tile, weight_first, spread)
    for tile, weight_first in ((16, True), (32, True), (64, True), (64, False), (128, False), (128, True))
    for spread in (False, True)
)


def ways_of(rows: float, *, codes: bool) -> list[Way]:
    """What may be worth a try for so many rows of an expert on average."""
    ways = [way for way in WAYS if rows / 3 <= way.tile <= max(16, 4 * rows) or (way.tile >= 64 and rows > 128)]
    # Of many rows no side is short.
    ways = [way for way in ways if not (way.weight_first and rows >= 128)]
    # Of codes the widest tile, weight first, has no cut whose sums are in registers.
    return [way for way in ways if not (codes and way.weight_first and way.tile == 128)]


def start_cut(way: Way, *, codes: bool) -> Cut:
    """Where a search begins: about as many bytes on their way as the defaults have."""
    if way.tile == 128 and not codes:
        return Cut(128, 64, 8, 4)
    return Cut(128, 128 if codes else 64, 8 if way.tile >= 64 and codes else 4, 3)


def cut_fits(cut: Cut, way: Way, matrices: int, *, codes: bool) -> bool:
    """matrices: that a program multiplies by. Its sums are in registers, of codes also the products that are added."""
    shared = cut.stages * (way.tile + matrices * cut.block_n) * cut.block_k * (1 if codes else 2)
    sums = matrices * way.tile * cut.block_n // (32 * cut.warps)
    # The last of these spills a little, and is the only one of its tile.
    fits = sums <= 64 or (sums == 128 and (not codes or (way.tile == 128 and cut.warps == 8 and not way.weight_first)))
    return LEAST_SHARED_BYTES <= shared <= SHARED_BYTES and fits


def gate_up_fits(cut: GateUpCut, hidden: int, width: int, element: int) -> bool:
    """What is on its way into shared memory fits it; x and a tile fit registers; no column is read for nothing."""
    if cut.block_k > hidden or width % (cut.block_n * cut.tiles) or cut.block_n * cut.lanes < 32:
        return False
    if cut.lanes * 16 // element > cut.block_k or (cut.stages > 1 and cut.tiles == 1):
        return False
    x_registers = hidden * element // 2 // cut.lanes  # FP8 is multiplied in pairs, the rest in float32
    tile_bytes = 2 * cut.block_n * cut.block_k * element
    on_their_way = (cut.stages - 1) * 2 * cut.block_n * hidden * element
    return x_registers <= 128 and tile_bytes <= 512 * 32 * cut.warps and on_their_way <= SHARED_BYTES


def down_fits(cut: DownCut, top_k: int, hidden: int, width: int, element: int) -> bool:
    """All that is read ahead is in registers; no column is read for nothing."""
    chunk = top_k * cut.block_n * cut.block_k * element
    if hidden % cut.block_n or width % cut.block_k or cut.ahead > width // cut.block_k:
        return False
    return chunk * max(cut.ahead, 1) <= 512 * 32 * cut.warps


@dataclass
class Search:
    """From a cut to its neighbours on each axis, and from the best of those again.

    times: us of each cut that has run; infinity if it did not work. fits: which cuts may be tried.
    """

    start: Any
    axes: Axes
    fits: Callable[[Any], bool]
    times: dict[Any, float] = field(default_factory=dict)

    @property
    def best(self) -> Any:
        return min(self.times, key=self.times.__getitem__) if self.times else self.start

    def wanted(self) -> list[Any]:
        """What to try next: the start, all of what helped alone at once, and the best one's neighbours."""
        cuts = [self.start, self._improved(), *self._neighbours(self.best)]
        return [cut for cut in dict.fromkeys(cuts) if cut not in self.times and (cut == self.start or self.fits(cut))]

    def _neighbours(self, cut: Any) -> list[Any]:
        return [replace(cut, **{axis: value}) for axis, values in self.axes.items() for value in values]

    def _improved(self) -> Any:
        """The start with the best known value of each axis."""
        best = {}
        for axis, values in self.axes.items():
            alone = {value: self.times.get(replace(self.start, **{axis: value}), inf) for value in values}
            if min(alone.values()) < inf:
                best[axis] = min(alone, key=alone.__getitem__)
        return replace(self.start, **best)
