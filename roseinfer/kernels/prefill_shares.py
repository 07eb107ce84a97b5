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

from roseinfer.kernels import early_start
from roseinfer.kernels.paged import no_peak, padded_dim
from roseinfer.kernels.triton_support import cdiv, tl, triton

# Columns of a map of blocks.
ROW, FIRST, PART, PARTS = range(4)
RESIDENT = 2  # programs of small tiles that a multiprocessor runs at once, of which each is as fast as one alone
_MERGE_TILES = 4  # what writing parts and merging them takes, in the time of one tile of keys
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
        programs = max(1, processors * RESIDENT // kv_heads)
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
    length = part_length(int(tiles.max()), int(tiles.sum()), division.programs)
    if length is None:
        return None, tiles
    # An eighth too long is better than one more part.
    parts = np.maximum(-(-(8 * tiles - length) // (8 * length)), 1)
    taken = int(parts.sum())
    if taken - int((parts == 1).sum()) > division.slots or (room is not None and taken > room):
        return None, tiles
    return parts, tiles


def part_length(longest: int, total: int, programs: int) -> int | None:
    """Tiles of a part at most, so that all are done soonest; None if undivided blocks are, or about.

    longest, total: tiles of the longest block, and of all. Programs begin longest first, `programs` of them at once,
    so that they take about as many rounds of the longest as hold all tiles.
    """
    best, found = _GAIN * longest * cdiv(total, longest * programs) - _MERGE_TILES, None
    for parts in range(2, longest // _LEAST_TILES + 1):
        length = cdiv(longest, parts)
        rounds = cdiv(total, length * programs)
        if rounds > _MOST_ROUNDS:
            break
        if length * rounds < best:
            best, found = length * rounds, length
    return found


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
        PAIRS=4,
        AT_ONCE=8,
        num_warps=4,
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
    PAIRS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (h, i): KV head h of the block that entry i is a part of; each of its parts' programs takes some of its
    (query, head) pairs.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    entry = tl.program_id(1)
    row = tl.load(block_map + 4 * entry)
    first = tl.load(block_map + 4 * entry + 1)
    part = tl.load(block_map + 4 * entry + 2)
    parts = tl.load(block_map + 4 * entry + 3)
    if parts < 2:
        return
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    dim = tl.arange(0, D_PAD)
    for piece in range(part, BLOCK_M // PAIRS, parts):
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
