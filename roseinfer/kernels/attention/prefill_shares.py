"""The contexts of short prompt chunks, divided among the GPU's multiprocessors: flash decoding (Dao et al., 2023).

A block of queries is a program that walks its context from end to end. A short chunk has few blocks, so that behind a
long context most of the GPU would wait for those few. Therefore a context may be cut into parts, each a program of its
own that leaves its sums in a workspace, and a second kernel merges the parts. Who cuts what is decided on the host, by
how many rounds of programs a step would take.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roseinfer.kernels.attention.paged import no_peak, padded_dim
from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, tl, triton

# Columns of a map of blocks.
ROW, FIRST, PART, PARTS = range(4)
# Parts of a block that `prefill_bulk` takes, whole; `prefill_attention` passes over it.
IN_BULK = 0
# In the time that a program of small tiles takes for a tile of keys if it has a multiprocessor to itself (0.9 us for 64
# keys of 128, H200): what a program takes to begin, and what it takes to merge parts, as many as run at once.
_BEGIN_TILES = 4
_MERGE_TILES, _MERGE_TILES_FULL = 6, 10
_RESIDENT, _CROWDED = 2, 1.4  # programs that a multiprocessor runs at once, and how much slower each is then
_LEAST_TILES = 2  # of a part
_GAIN = 0.9  # of the time of undivided contexts, at most
_MOST_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Division:
    """How far contexts are divided. programs: of one KV head, that the GPU runs at once. block_n: keys of a tile.

    slots: parts that there is a workspace for. window: of the layers whose programs are to end together, 0 for none.
    """

    programs: int
    slots: int
    block_n: int
    window: int = 0

    @classmethod
    def of(cls, processors: int, kv_heads: int, block_n: int, window: int = 0) -> "Division":
        programs = max(1, processors * _RESIDENT // kv_heads)
        return cls(programs, _MOST_ROUNDS * programs, block_n, window)


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """Where parts are left: sums [slots, kv_heads, block_m, D] and, of each (query, head), its peak and its total in
    peaks [slots, kv_heads, 2, block_m], float32. Allocated once, so that captured graphs stay valid.
    """

    sums: torch.Tensor
    peaks: torch.Tensor

    @classmethod
    def allocate(
        cls, slots: int, kv_heads: int, block_m: int, head_dim: int, device: torch.device
    ) -> "PrefillWorkspace":
        return cls(
            sums=torch.empty((slots, kv_heads, block_m, head_dim), dtype=torch.float32, device=device),
            peaks=torch.empty((slots, kv_heads, 2, block_m), dtype=torch.float32, device=device),
        )


def map_blocks(
    first_row: int,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    queries: int,
    division: Division | None = None,
    room: int | None = None,
) -> np.ndarray:
    """Cut rows first_row .. into blocks of at most `queries` queries, and with a `division` their contexts into parts.

    Returns [G, 4] int32 = row, first query within the row, part, number of parts. The parts of a block stand side by
    side, in order; those of divided blocks come first, and so have the slots of the workspace that their places say.
    Longest first: no long one begins when the others are about to end. `room`: no context is divided if the map would
    have more entries than that.
    """
    counts = np.asarray(query_lens, dtype=np.int64)
    blocks = -(-counts // queries)
    row = np.repeat(np.arange(len(counts)), blocks)
    first = (np.arange(row.shape[0]) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * queries
    contexts = np.asarray(context_lens, dtype=np.int64)
    position = (contexts - counts)[row] + first
    if division is not None and len(row):
        parts, tiles = _parts(position, np.minimum(position + queries, contexts[row]), division, room)
        if parts is not None:
            order = np.lexsort((-tiles // parts, parts == 1))
            return _entries(row[order] + first_row, first[order], parts[order])
    order = np.argsort(-position, kind="stable")
    return _entries(row[order] + first_row, first[order], np.ones(len(order), dtype=np.int64))


def _entries(row: np.ndarray, first: np.ndarray, parts: np.ndarray) -> np.ndarray:
    found = np.empty((int(parts.sum()), 4), dtype=np.int32)
    found[:, ROW] = np.repeat(row, parts)
    found[:, FIRST] = np.repeat(first, parts)
    found[:, PART] = np.arange(len(found)) - np.repeat(np.cumsum(parts) - parts, parts)
    found[:, PARTS] = np.repeat(parts, parts)
    return found


def _parts(
    position: np.ndarray, end: np.ndarray, division: Division, room: int | None
) -> tuple[np.ndarray | None, np.ndarray]:
    """Into how many parts each block's context is cut, None if it does not pay for any; and its length in tiles.

    position: of the first query of each block; end: behind its last. Both [B].
    """
    tiles = -(-end // division.block_n)
    if division.window:
        tiles -= np.maximum(position - division.window + 1, 0) // division.block_n
    longest, total = int(tiles.max()), int(tiles.sum())
    wide = int(np.count_nonzero(2 * tiles > longest))
    most = longest // _LEAST_TILES
    while (count := part_count(longest, total, wide, division.programs, most)) > 1:
        length = cdiv(longest, count)
        # An eighth too long is better than one more part.
        parts = np.maximum(-(-(8 * tiles - length) // (8 * length)), 1)
        taken = int(parts.sum())
        if taken - int(np.count_nonzero(parts == 1)) <= division.slots and (room is None or taken <= room):
            return parts, tiles
        most = 3 * count // 4
    return None, tiles


def part_count(longest: int, total: int, wide: int, programs: int, most: int) -> int:
    """Into how many parts, of `most`, the longest block is best cut; others are cut into parts of that length.

    longest, total: tiles of the longest block, and of all. wide: blocks of more than half of that length. programs:
    that run at once. What a step takes is estimated in tiles: programs begin longest first, so they run in about as
    many rounds as hold all tiles, and all parts of wide blocks.
    """
    best = _GAIN * _step_tiles(longest, max(cdiv(total, longest), wide), programs)
    found = 1
    for count in range(2, most + 1):
        length = cdiv(longest, count)
        parts = max(cdiv(total, length), wide * count)
        if parts > _MOST_ROUNDS * programs or best <= _MERGE_TILES + _BEGIN_TILES:
            break
        merging = _MERGE_TILES + (_MERGE_TILES_FULL - _MERGE_TILES) * parts / programs
        tiles = merging + _step_tiles(length, parts, programs)
        if tiles < best:
            best, found = tiles, count
    return found


def _step_tiles(length: int, number: int, programs: int) -> float:
    """Time of `number` programs of `length` tiles each."""
    if _RESIDENT * number <= programs:
        return length + _BEGIN_TILES
    return _CROWDED * (length + _BEGIN_TILES) * cdiv(number, programs)


def merge_parts(
    block_map: torch.Tensor,
    query_start: torch.Tensor,
    workspace: PrefillWorkspace,
    out: torch.Tensor,
) -> None:
    """Write to `out` [T, heads, D] what the parts in `workspace` sum up to, for the divided blocks of `block_map`.

    `block_map`, `query_start`: what `prefill_attention` was given.
    """
    slots, kv_heads, block_m, head_dim = workspace.sums.shape
    _merge_kernel[(kv_heads, min(slots, block_map.shape[0]))](
        block_map,
        query_start,
        workspace.sums,
        workspace.peaks,
        out,
        KV_HEADS=kv_heads,
        GROUP=out.shape[1] // kv_heads,
        D=head_dim,
        D_PAD=padded_dim(head_dim),
        BLOCK_M=block_m,
        num_warps=4 if head_dim <= 128 else 8,
        **early_start.options(out.device),
    )


@triton.jit
def _merge_kernel(
    block_map,
    query_start,
    sums,
    peaks,
    out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (h, i): KV head h of the block that entry i is a part of; each of its parts' programs takes some of its
    (query, head) pairs.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    entry = tl.program_id(1)
    row = tl.load(block_map + 4 * entry)
    first = tl.load(block_map + 4 * entry + 1)
    part = tl.load(block_map + 4 * entry + 2)
    parts = tl.load(block_map + 4 * entry + 3)
    if parts < 2:
        return
    # As many numbers at once whatever the number of parts: with few of them a program takes many pairs, else few.
    if parts <= 2:
        _merge(query_start, sums, peaks, out, row, first, entry, part, parts, KV_HEADS, GROUP, D, D_PAD, BLOCK_M, 2)
    elif parts <= 4:
        _merge(query_start, sums, peaks, out, row, first, entry, part, parts, KV_HEADS, GROUP, D, D_PAD, BLOCK_M, 4)
    elif parts <= 8:
        _merge(query_start, sums, peaks, out, row, first, entry, part, parts, KV_HEADS, GROUP, D, D_PAD, BLOCK_M, 8)
    else:
        _merge(query_start, sums, peaks, out, row, first, entry, part, parts, KV_HEADS, GROUP, D, D_PAD, BLOCK_M, 16)


@triton.jit
def _merge(
    query_start, sums, peaks, out, row, first, entry, part, parts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What the program of one part does of the merging of its block, `AT_ONCE` parts at a time."""
    kv_head = tl.program_id(0)
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    PAIRS: tl.constexpr = BLOCK_M // AT_ONCE
    dim = tl.arange(0, D_PAD)
    for piece in range(part, AT_ONCE, parts):
        pair = piece * PAIRS + tl.arange(0, PAIRS)
        query = first + pair // GROUP
        real = (query < count) & (pair < QUERIES * GROUP)
        peak = no_peak(PAIRS)
        total = tl.zeros([PAIRS], tl.float32)
        acc = tl.zeros([PAIRS, D_PAD], tl.float32)
        for before in range(0, parts, AT_ONCE):
            index = before + tl.arange(0, AT_ONCE)
            inside = real[:, None] & (index < parts)[None, :]
            place = (entry - part + index) * KV_HEADS + kv_head
            # Past the L1 cache, which may hold what was here in an earlier layer.
            at = peaks + (place * 2 * BLOCK_M)[None, :] + pair[:, None]
            part_peak = tl.load(at, mask=inside, other=-1e38, cache_modifier=".cg")
            part_total = tl.load(at + BLOCK_M, mask=inside, other=0.0, cache_modifier=".cg")
            at = sums + ((place * BLOCK_M)[None, :] + pair[:, None])[:, :, None] * D + dim[None, None, :]
            mask = inside[:, :, None] & (dim < D)[None, None, :]
            part_sum = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(peak, tl.max(part_peak, 1))
            fade, weight = tl.exp2(peak - higher), tl.exp2(part_peak - higher[:, None])
            total = total * fade + tl.sum(part_total * weight, 1)
            acc = acc * fade[:, None] + tl.sum(part_sum * weight[:, :, None], 1)
            peak = higher
        token = (begin + query).to(tl.int64)
        head = kv_head * GROUP + pair % GROUP
        target = out + ((token * KV_HEADS * GROUP + head) * D)[:, None] + dim[None, :]
        total = tl.where(real, total, 1.0)
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None] & (dim < D)[None, :])
