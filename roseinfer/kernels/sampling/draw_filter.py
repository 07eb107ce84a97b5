"""Top-k and top-p without sorting: the border between kept and dropped tokens of a row.

The measure of a set of tokens is their number (top-k) or their mass (top-p). The border is the smallest logit above
which the measure is below a target, k or p times the mass. It is found in three steps.

    narrow   Measures above a few logits show between which of them the border lies; each round cuts that interval.
             The first round's logits are at doubling distances from the best one, as distributions differ in width.
    collect  The tokens in the interval are gathered; with top-k all above it too, as top-p needs those next.
    finish   One program a row bisects the bits of the gathered logits, see `draw_search`.

Narrowing adds up float32 and might err. The last step checks the interval by exact sums, and takes the whole row if it
is wrong or too many tokens were gathered. So the result does not depend on narrowing.
"""

from typing import Any

import torch

from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton
from roseinfer.kernels.sampling.argmax import load_chunk, row_best
from roseinfer.kernels.sampling.draw_search import finish_kernel
from roseinfer.kernels.sampling.draw_weights import fixed, is_filtered, row_settings, weigh

ROUND_COUNT = 3
MAX_GATHERED_TOKENS = 16384  # per row
TILE_TOKENS = 4096  # gathered tokens that the last step processes at once

_EDGES = tl.constexpr(8)  # logits above which a round measures


@triton.jit
def _narrow_target(sums_row, top_p, top_k, by_count, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """Return k, or p times the mass that the first round measured above its last edge, -inf."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    sums = tl.load(sums_row + chunk * _EDGES + (_EDGES - 1), mask=chunk < CHUNKS, other=0.0)
    mass = tl.maximum(top_p * tl.sum(sums.to(tl.float64), 0), 1e-13)
    return tl.where(by_count, top_k.to(tl.float64), mass)


@triton.jit
def _interval(edges_row, sums_row, target, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """Return the two edges of a round around the border: above the first, not above the second."""
    chunk = tl.arange(0, CHUNKS_BLOCK)[:, None]
    edge = tl.arange(0, _EDGES)[None, :]
    sums = tl.load(sums_row + chunk * _EDGES + edge, mask=chunk < CHUNKS, other=0.0)
    beyond = tl.sum((tl.sum(sums.to(tl.float64), 0) < target).to(tl.int32), 0)
    low = tl.load(edges_row + beyond, mask=beyond < _EDGES, other=float("-inf"))
    return low, tl.load(edges_row + tl.maximum(beyond - 1, 0))


@triton.jit(do_not_specialize=("seats_ptr",))
def _narrow_kernel(
    logits_ptr,
    best_ptr,
    seats_ptr,
    settings_ptr,
    integers_ptr,
    first_sums_ptr,
    edges_before_ptr,
    sums_before_ptr,
    edges_ptr,
    sums_ptr,
    sizes_ptr,
    vocab_size,
    logits_stride,
    FIRST: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Measure, in program (row, chunk), the chunk above this round's edges, [n, chunks, edges] float32."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    best, _token = row_best(best_ptr + row * CHUNKS, CHUNKS, CHUNKS_BLOCK)
    seat = tl.load(seats_ptr + row).to(tl.int64)
    scale, top_p, min_p, top_k, is_random = row_settings(settings_ptr, integers_ptr, seat, best)
    filtered, by_count = is_filtered(top_p, top_k, vocab_size, is_random)
    if filtered:
        reach = 44.0 / scale  # where weights become 0
        low = float("-inf")
        high = best
        if not FIRST:
            target = _narrow_target(
                first_sums_ptr + row * CHUNKS * _EDGES, top_p, top_k, by_count, CHUNKS, CHUNKS_BLOCK
            )
            low, high = _interval(
                edges_before_ptr + row * _EDGES, sums_before_ptr + row * CHUNKS * _EDGES, target, CHUNKS, CHUNKS_BLOCK
            )
        x = load_chunk(logits_ptr + row * logits_stride, chunk, vocab_size, CHUNK)
        measure = tl.where(by_count, (x > float("-inf")).to(tl.float32), weigh(x, best, scale, min_p))
        for i in tl.static_range(_EDGES):
            if i == 0:
                edge = high
            elif i == _EDGES - 1:
                edge = low
            elif FIRST:
                edge = high - reach * (0.5 ** (_EDGES - 2 - i))
            else:
                edge = high - (high - low) * (i / (_EDGES - 1))
            if chunk == 0:
                tl.store(edges_ptr + row * _EDGES + i, edge)
            at = sums_ptr + (row * CHUNKS + chunk) * _EDGES + i
            tl.store(at, tl.sum(tl.where(x > edge, measure, 0.0), 0))
        if FIRST and chunk == 0:
            tl.store(sizes_ptr + row, 0)


@triton.jit(do_not_specialize=("seats_ptr",))
def _collect_kernel(
    logits_ptr,
    best_ptr,
    seats_ptr,
    settings_ptr,
    integers_ptr,
    first_sums_ptr,
    edges_ptr,
    sums_ptr,
    sizes_ptr,
    bounds_ptr,
    masses_ptr,
    gathered_ptr,
    vocab_size,
    logits_stride,
    CAPACITY: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Append, in program (row, chunk), the chunk's tokens in the interval to the row's; sum exact masses of the chunk.

    bounds: [n, 2], the interval. masses: [n, chunks, 3] int64: above the interval, in it, and all.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    best, _token = row_best(best_ptr + row * CHUNKS, CHUNKS, CHUNKS_BLOCK)
    seat = tl.load(seats_ptr + row).to(tl.int64)
    scale, top_p, min_p, top_k, is_random = row_settings(settings_ptr, integers_ptr, seat, best)
    filtered, by_count = is_filtered(top_p, top_k, vocab_size, is_random)
    if filtered:
        target = _narrow_target(first_sums_ptr + row * CHUNKS * _EDGES, top_p, top_k, by_count, CHUNKS, CHUNKS_BLOCK)
        low, high = _interval(edges_ptr + row * _EDGES, sums_ptr + row * CHUNKS * _EDGES, target, CHUNKS, CHUNKS_BLOCK)
        if chunk == 0:
            tl.store(bounds_ptr + row * 2, low)
            tl.store(bounds_ptr + row * 2 + 1, high)
        x = load_chunk(logits_ptr + row * logits_stride, chunk, vocab_size, CHUNK)
        inside = (x > low) & (x <= tl.where(by_count, float("inf"), high))
        number = inside.to(tl.int32)
        first = tl.atomic_add(sizes_ptr + row, tl.sum(number, 0))
        place = first + tl.cumsum(number, 0) - 1
        gathered_ptr += row * CAPACITY
        tl.store(gathered_ptr + place, x.to(gathered_ptr.dtype.element_ty), mask=inside & (place < CAPACITY))
        weight = fixed(weigh(x, best, scale, min_p))
        at = masses_ptr + (row * CHUNKS + chunk) * 3
        tl.store(at, tl.sum(tl.where(x > high, weight, 0), 0))
        tl.store(at + 1, tl.sum(tl.where(inside, weight, 0), 0))
        tl.store(at + 2, tl.sum(weight, 0))


def find_borders(
    logits: torch.Tensor,
    best: torch.Tensor,
    seats: torch.Tensor,
    settings: torch.Tensor,
    integers: torch.Tensor,
    *,
    chunk: int,
    num_warps: int,
    rounds: int = ROUND_COUNT,
    capacity: int = MAX_GATHERED_TOKENS,
    tile: int = TILE_TOKENS,
    finish_warps: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return border logits [n] float32 and the kept tokens at the border, [n] int32; undefined for unfiltered rows.

    Arguments as for `draw`; best: the result of `chunk_best` with this `chunk`.
    """
    rows, vocab_size = logits.shape
    chunks = best.shape[1]
    edges = torch.empty((rounds, rows, 8), dtype=torch.float32, device=logits.device)
    sums = torch.empty((rounds, rows, chunks, 8), dtype=torch.float32, device=logits.device)
    sizes = torch.empty(rows, dtype=torch.int32, device=logits.device)
    bounds = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    masses = torch.empty((rows, chunks, 3), dtype=torch.int64, device=logits.device)
    gathered = torch.empty((rows, capacity), dtype=logits.dtype, device=logits.device)
    border = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ties = torch.empty(rows, dtype=torch.int32, device=logits.device)
    row = (logits, best, seats, settings, integers)
    sizing: dict[str, Any] = {"CHUNKS": chunks, "CHUNKS_BLOCK": next_power_of_2(chunks)}
    cutting = sizing | {"CHUNK": chunk, "num_warps": num_warps}
    stride = logits.stride(0)
    for i in range(rounds):
        before = max(i - 1, 0)
        _narrow_kernel[(rows, chunks)](
            *row,
            sums,
            edges[before],
            sums[before],
            edges[i],
            sums[i],
            sizes,
            vocab_size,
            stride,
            FIRST=i == 0,
            **cutting,
        )
    _collect_kernel[(rows, chunks)](
        *row,
        sums,
        edges[-1],
        sums[-1],
        sizes,
        bounds,
        masses,
        gathered,
        vocab_size,
        stride,
        CAPACITY=capacity,
        **cutting,
    )
    finish_kernel[(rows,)](
        *row,
        sizes,
        bounds,
        masses,
        gathered,
        border,
        ties,
        vocab_size,
        stride,
        CAPACITY=capacity,
        SHIFT={torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[logits.dtype],
        TILE=tile,
        num_warps=finish_warps,
        **sizing,
    )
    return border, ties
