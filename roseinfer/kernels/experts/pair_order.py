"""Sorting of pairs of a token and an expert by expert, and cutting of the sorted rows into tiles.

Everything stays on the device, and launches depend only on the numbers of tokens and experts, so that a graph can
capture them. There are as many places as there may be tiles, and some stay empty.

Expert e begins at row b, the number of pairs of all experts before it. Its tiles begin at place b // tile + e, because
e experts before it with b pairs fill at most so many places.

Of few pairs, a program sorts those of one expert and needs nothing from other programs: it looks at all pairs. Many
pairs are cut into chunks. One launch counts the pairs of each expert in each chunk. In the next one, a program adds up
the counts before its own chunk's pairs, and places these.
"""

from typing import NamedTuple

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton

# Up to so many pairs each program looks at all of them. More are cut into chunks: about one for each multiprocessor, of
# at least so many pairs.
_MAX_UNCUT_PAIRS, _MAX_CHUNKS, _MIN_CHUNK_PAIRS = 8192, 128, 64
# Pairs that a program counts together, and pairs that it places one after another.
_COUNTED_PAIRS, _PLACED_PAIRS = 512, 32
# Places of tiles that a program fills together.
_PROGRAM_TILES = 32
# Counts that a thread adds up at once.
_THREAD_ELEMENTS = 128


class Order(NamedTuple):
    """Pairs sorted by expert, those of an expert by token. Pair t * k + j is token t's j-th expert.

    pairs: [P] int32, the pair of each row. tiles: [3, places] int32, for each place the expert, its first row, and the
    end of that expert's rows; an empty place ends where it starts. tile: rows of a tile.
    """

    pairs: torch.Tensor
    tiles: torch.Tensor
    tile: int

    @property
    def places(self) -> int:
        return self.tiles.shape[1]


class OrderConfig(NamedTuple):
    """Division of sorting. block: pairs that a program takes together: all, or some of its chunk."""

    block: int
    warps: int
    chunk: int = 0


def _choose_config(pairs: int, experts: int) -> OrderConfig:
    """Return the fastest config for 128 experts, on an H200 (torch 2.11, Triton 3.6; 2026-11-23).

    In a graph of such launches it takes 1.4 us for 24 tokens of 8 experts, 2.4 for 256, 5.0 for 536, 7.1 for 1,088,
    7.5 for 2,048, 13 for 8,192.
    """
    for most, warps in ((512, 4), (2048, 4), (4096, 8), (_MAX_UNCUT_PAIRS, 16)):
        if pairs <= most:
            return OrderConfig(most, warps)
    chunk = max(_MIN_CHUNK_PAIRS, cdiv(cdiv(pairs, _MAX_CHUNKS), _PLACED_PAIRS) * _PLACED_PAIRS)
    return OrderConfig(_PLACED_PAIRS, min(max(4, next_power_of_2(experts) // 32), 8), chunk)


@triton.jit(do_not_specialize=["count", "places"])
def order_kernel(
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
    """Sort, in each program, the pairs of one expert. BLOCK: at least `count`, at most 2^14."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < count, other=2147483647)
    mine = (ids == expert).to(tl.int32)
    # Both numbers in one sum, since threads synchronise at each step of a sum.
    below_and_own = tl.sum((ids < expert).to(tl.int32) + (mine << 16), 0)
    first = below_and_own & 0xFFFF
    end = first + (below_and_own >> 16)
    tl.store(pairs_ptr + first + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)

    # Invalid ids leave rows out and places empty, so that nothing is read outside of a matrix.
    place = tl.where(expert == 0, 0, first // TILE + expert)
    next_place = tl.where(expert == tl.num_programs(0) - 1, places, end // TILE + expert + 1)
    some = tl.arange(0, PLACES)
    for start in tl.range(place, next_place, PLACES):
        inside = start + some < next_place
        row = tl.minimum(first + (start - place + some) * TILE, end)
        tl.store(tiles_ptr + start + some, tl.zeros([PLACES], tl.int32) + expert, mask=inside)
        tl.store(tiles_ptr + places + start + some, row, mask=inside)
        tl.store(tiles_ptr + 2 * places + start + some, tl.zeros([PLACES], tl.int32) + end, mask=inside)


@triton.jit(do_not_specialize=["count", "chunk"])
def count_kernel(
    ids_ptr,
    counts_ptr,
    count,
    chunk,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Count each expert's pairs in a program's chunk, to counts [chunks, E_PAD]."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * chunk
    end = tl.minimum(first + chunk, count)
    own = tl.zeros([E_PAD], tl.int32)
    for start in tl.range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < end, other=-1)
        own += tl.histogram(ids, E_PAD, mask=(ids >= 0) & (ids < E))
    out = counts_ptr + tl.program_id(0) * E_PAD + tl.arange(0, E_PAD)
    tl.store(out, own.to(counts_ptr.dtype.element_ty))


@triton.jit
def _sum_of_first(sum_a, a, other_a, sum_b, b, other_b):
    return sum_a + sum_b, b, other_b


@triton.jit(do_not_specialize=["count", "chunk", "places"])
def place_kernel(
    ids_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    count,
    chunk,
    places,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Place a chunk's pairs, BLOCK at a time, and some of the tiles. CHUNKS: how many chunks' counts to add at once."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number, chunks = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, E_PAD)
    total, before = tl.zeros([E_PAD], tl.int32), tl.zeros([E_PAD], tl.int32)
    for start in tl.range(0, chunks, CHUNKS):
        other = start + tl.arange(0, CHUNKS)[:, None]
        counts = tl.load(counts_ptr + other * E_PAD + expert[None, :], mask=other < chunks, other=0).to(tl.int32)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(other < number, counts, 0), 0)
    # Loaded together, so that the same threads hold them.
    ends, total, before = tl.associative_scan((total, total, before), 0, _sum_of_first)
    firsts = ends - total

    # A thread has experts of its own, and goes through the pairs one by one, without synchronisation.
    row = firsts + before
    end = tl.minimum((number + 1) * chunk, count)
    for start in tl.range(number * chunk, end, BLOCK):
        ids = ()
        for i in tl.static_range(BLOCK):
            ids += (tl.load(ids_ptr + start + i, mask=start + i < end, other=-1),)
        for i in tl.static_range(BLOCK):
            mine = (expert == ids[i]) & (expert < E)  # invalid ids leave rows out, after all others
            tl.store(pairs_ptr + row, tl.zeros_like(row) + start + i, mask=mine)
            row += mine.to(tl.int32)

    # Tiles number, number + chunks, ... of each expert; remaining places are the last expert's.
    place = firsts // TILE + expert
    next_place = tl.where(expert == E - 1, places, ends // TILE + expert + 1)
    tiles = tl.where(expert < E, next_place - place, 0)
    for tile in tl.range(number, tl.max(tiles, 0), chunks):
        out, inside = tiles_ptr + place + tile, tile < tiles
        tl.store(out, expert, mask=inside)
        tl.store(out + places, tl.minimum(firsts + tile * TILE, ends), mask=inside)
        tl.store(out + 2 * places, ends, mask=inside)


def order_pairs(ids: torch.Tensor, experts: int, tile: int, config: OrderConfig | None = None) -> Order:
    """Sort pairs and cut them into tiles of `tile` rows, a power of two. Starts early (see `early_start`).

    ids: [T, k] int32, contiguous, each below `experts`.
    """
    pairs = ids.numel()
    assert ids.dtype == torch.int32 and ids.is_contiguous() and tile == next_power_of_2(tile)
    order = Order(
        torch.empty(pairs, dtype=torch.int32, device=ids.device),
        torch.empty((3, pairs // tile + experts), dtype=torch.int32, device=ids.device),
        tile,
    )
    config = config or _choose_config(pairs, experts)
    if config.chunk:
        _order_chunks(ids, order, experts, config)
        return order
    assert pairs <= config.block <= 1 << 14
    order_kernel[(experts,)](
        ids,
        order.pairs,
        order.tiles,
        pairs,
        order.places,
        TILE=tile,
        BLOCK=config.block,
        PLACES=_PROGRAM_TILES,
        num_warps=config.warps,
        **early_start.options(ids.device),
    )
    return order


def _order_chunks(ids: torch.Tensor, order: Order, experts: int, config: OrderConfig) -> None:
    pairs, padded = ids.numel(), max(32, next_power_of_2(experts))  # a warp counts into at least as many places
    chunks = cdiv(pairs, config.chunk)
    # Each program of the second launch reads all counts, so they have few bytes.
    counts = torch.empty(
        (chunks, padded), dtype=torch.int16 if config.chunk < 1 << 15 else torch.int32, device=ids.device
    )
    count_kernel[(chunks,)](
        ids,
        counts,
        pairs,
        config.chunk,
        E=experts,
        E_PAD=padded,
        BLOCK=_COUNTED_PAIRS,
        num_warps=4,
        **early_start.options(ids.device),
    )
    place_kernel[(chunks,)](
        ids,
        counts,
        order.pairs,
        order.tiles,
        pairs,
        config.chunk,
        order.places,
        E=experts,
        E_PAD=padded,
        TILE=order.tile,
        CHUNKS=min(_MAX_CHUNKS, max(1, 32 * config.warps * _THREAD_ELEMENTS // padded)),
        BLOCK=config.block,
        num_warps=config.warps,
        **early_start.options(ids.device),
    )


def order_reference(ids: torch.Tensor, experts: int, tile: int) -> Order:
    """`order_pairs` in plain torch."""
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
