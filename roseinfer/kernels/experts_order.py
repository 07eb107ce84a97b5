"""Which rows of a product belong to which expert: pairs of a token and an expert sorted by expert, and cut into tiles.

Everything stays on the device, and the launch depends on the numbers of tokens and experts alone, so that it can be
captured in a graph: there are as many places for tiles as there may be tiles, and some stay empty.

A program sorts the pairs of one expert, and needs nothing from the others: expert e begins at row b, the number of
pairs of all experts before it. Its tiles begin at place b // tile + e, because e experts before it with b pairs fill at
most so many places.
"""

from typing import NamedTuple

import torch

from roseinfer.kernels import early_start
from roseinfer.kernels.triton_support import next_power_of_2, tl, triton

# Pairs that a program looks at together, few or many of them, and places of tiles that it fills together.
_FEW, _MANY, _PLACES = 2048, 16384, 32


class Order(NamedTuple):
    """Pairs sorted by expert, those of an expert by token. Pair t * k + j is token t's j-th expert.

    pairs: [P] int32, the pair of each row. tiles: [3, places] int32, of each place the expert, its first row, and the
    end of that expert's rows; an empty place ends where it starts. tile: rows of a tile.
    """

    pairs: torch.Tensor
    tiles: torch.Tensor
    tile: int

    @property
    def places(self) -> int:
        return self.tiles.shape[1]


@triton.jit(do_not_specialize=["count", "places"])
def _order_kernel(
    ids_ptr,
    pairs_ptr,
    tiles_ptr,
    count,
    places,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    below, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, count, BLOCK):
        ids = tl.load(ids_ptr + start + at, mask=start + at < count, other=2147483647)
        below += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    first = tl.sum(below, 0)
    end = first + tl.sum(own, 0)

    # Ids that are none leave rows out, and places empty: nothing is read from where nothing is.
    place = tl.where(expert == 0, 0, first // TILE + expert)
    next_place = tl.where(expert == tl.num_programs(0) - 1, places, end // TILE + expert + 1)
    some = tl.arange(0, PLACES)
    for start in tl.range(place, next_place, PLACES):
        inside = start + some < next_place
        row = tl.minimum(first + (start - place + some) * TILE, end)
        tl.store(tiles_ptr + start + some, tl.zeros([PLACES], tl.int32) + expert, mask=inside)
        tl.store(tiles_ptr + places + start + some, row, mask=inside)
        tl.store(tiles_ptr + 2 * places + start + some, tl.zeros([PLACES], tl.int32) + end, mask=inside)

    row = first
    for start in tl.range(0, count, BLOCK):
        ids = tl.load(ids_ptr + start + at, mask=start + at < count, other=2147483647)
        mine = (ids == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0)
        tl.store(pairs_ptr + row + rank - 1, start + at, mask=mine > 0)
        row += tl.sum(mine, 0)


def order_pairs(ids: torch.Tensor, experts: int, tile: int) -> Order:
    """ids: [T, k] int32, contiguous, each below `experts`; tile: a power of two."""
    pairs = ids.numel()
    assert ids.dtype == torch.int32 and ids.is_contiguous() and tile == next_power_of_2(tile)
    order = Order(
        torch.empty(pairs, dtype=torch.int32, device=ids.device),
        torch.empty((3, pairs // tile + experts), dtype=torch.int32, device=ids.device),
        tile,
    )
    block = _FEW if pairs <= _FEW else _MANY
    _order_kernel[(experts,)](
        ids,
        order.pairs,
        order.tiles,
        pairs,
        order.places,
        TILE=tile,
        BLOCK=block,
        PLACES=_PLACES,
        num_warps=8 if block == _FEW else 16,
        **early_start.options(ids.device),
    )
    return order


def order_reference(ids: torch.Tensor, experts: int, tile: int) -> Order:
    """What `order_pairs` gives."""
    flat = ids.flatten().long()
    pairs = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts).tolist()
    tiles, start = torch.zeros((3, len(flat) // tile + experts), dtype=torch.int32), 0
    for expert, count in enumerate(counts):
        end, place = start + count, start // tile + expert
        for i in range(end // tile + expert + 1 - place):
            tiles[:, place + i] = torch.tensor([expert, min(start + i * tile, end), end])
        start = end
    return Order(pairs.int(), tiles.to(ids.device), tile)
