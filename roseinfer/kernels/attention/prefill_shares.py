"""Division of short prompt chunks' contexts among the GPU's multiprocessors: flash decoding (Dao et al., 2023).

A program takes a block of queries and walks its context from end to end. A short chunk has few blocks, so with a long
context most of the GPU would wait for them. Therefore a context may be cut into parts. Each part is a program that
leaves its sums in a workspace, and a second kernel merges the parts. The host decides what to cut, by the number of
rounds of programs that a step would take.
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
# Number of parts that marks a block for `prefill_bulk`, undivided; `prefill_attention` skips it.
IN_BULK = 0
# Times in tiles: one tile is the time of a program of small tiles for a tile of keys, alone on a multiprocessor (0.9 us
# for 64 keys of 128, H200). The start of a program, and merging parts, as many as run at once.
BEGIN_TILES = 4
MERGE_TILES, FULL_MERGE_TILES = 6, 10
_RESIDENT_PROGRAMS, _CROWDED_FACTOR = 2, 1.4  # programs that a multiprocessor runs at once, and their slowdown
_MIN_PART_TILES = 2  # per part
_MAX_TIME_SHARE = 0.9  # the most that a division may take, of the time without it
_MAX_ROUNDS = 2
# Of the longest context. Below it, decodes beside the chunk take as long, and parts would be in their way: of six
# classes at 35 requests/s (contexts of at most 1,536 tokens, Qwen3-8B, H200), .838 are in time undivided, .821 divided.
MIN_DIVIDED_TILES = 64


@dataclass(frozen=True, slots=True)
class Division:
    """Limits for dividing contexts. programs: of one KV head, that the GPU runs at once. block_n: keys of a tile.

    slots: parts that fit the workspace. window: of the layers whose programs are to end together, 0 for none.
    """

    programs: int
    slots: int
    block_n: int
    window: int = 0

    @classmethod
    def of(cls, processors: int, kv_heads: int, block_n: int, window: int = 0) -> "Division":
        programs = max(1, processors * _RESIDENT_PROGRAMS // kv_heads)
        return cls(programs, _MAX_ROUNDS * programs, block_n, window)

    def may_divide(self, context_len: int) -> bool:
        """Return True if contexts of at most `context_len` tokens may be so long that they are divided."""
        visible = min(context_len, self.window) if self.window else context_len
        return cdiv(visible, self.block_n) >= MIN_DIVIDED_TILES


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """Buffers for parts, allocated once so that captured graphs stay valid.

    sums: [slots, kv_heads, block_m, D] float32. peaks: [slots, kv_heads, 2, block_m] float32, the peak and the total of
    each (query, head).
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

    Returns [G, 4] int32 = row, first query within the row, part, number of parts. The parts of a block are adjacent and
    in order. Divided blocks come first, and their places in the map are their slots of the workspace. Longest come
    first, so that no long one begins when the others are about to end. room: no context is divided if the map would
    exceed so many entries.
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
    """Return the number of parts of each block's context, None if dividing does not pay; and its length in tiles.

    position: of the first query of each block; end: after its last. Both [B].
    """
    tiles = -(-end // division.block_n)
    if division.window:
        tiles -= np.maximum(position - division.window + 1, 0) // division.block_n
    longest, total = int(tiles.max()), int(tiles.sum())
    if longest < MIN_DIVIDED_TILES:
        return None, tiles
    wide = int(np.count_nonzero(2 * tiles > longest))
    most = longest // _MIN_PART_TILES
    while (count := part_count(longest, total, wide, division.programs, most)) > 1:
        length = cdiv(longest, count)
        # Parts an eighth too long are better than one more part.
        parts = np.maximum(-(-(8 * tiles - length) // (8 * length)), 1)
        taken = int(parts.sum())
        if taken - int(np.count_nonzero(parts == 1)) <= division.slots and (room is None or taken <= room):
            return parts, tiles
        most = 3 * count // 4
    return None, tiles


def part_count(longest: int, total: int, wide: int, programs: int, most: int) -> int:
    """Return the best number of parts, of at most `most`, for the longest block; others get parts of that length.

    longest, total: tiles of the longest block, and of all. wide: blocks of more than half of that length. programs:
    that run at once. The time of a step is estimated in tiles: programs begin longest first, so they run in about as
    many rounds as hold all tiles, and all parts of wide blocks.
    """
    best = _MAX_TIME_SHARE * _step_tiles(longest, max(cdiv(total, longest), wide), programs)
    found = 1
    for count in range(2, most + 1):
        length = cdiv(longest, count)
        parts = max(cdiv(total, length), wide * count)
        if parts > _MAX_ROUNDS * programs or best <= MERGE_TILES + BEGIN_TILES:
            break
        merging = MERGE_TILES + (FULL_MERGE_TILES - MERGE_TILES) * parts / programs
        tiles = merging + _step_tiles(length, parts, programs)
        if tiles < best:
            best, found = tiles, count
    return found


def _step_tiles(length: int, number: int, programs: int) -> float:
    """Return the time of `number` programs of `length` tiles each, in tiles."""
    if _RESIDENT_PROGRAMS * number <= programs:
        return length + BEGIN_TILES
    return _CROWDED_FACTOR * (length + BEGIN_TILES) * cdiv(number, programs)


def merge_parts(
    block_map: torch.Tensor,
    query_start: torch.Tensor,
    workspace: PrefillWorkspace,
    out: torch.Tensor,
) -> None:
    """Write the merged parts in `workspace` to `out` [T, heads, D], for the divided blocks of `block_map`.

    `block_map`, `query_start`: as given to `prefill_attention`.
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
    """Merge, in program (h, i), some (query, head) pairs of KV head h of entry i's block.

    The programs of a block's parts divide its pairs among them.
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
    # Constant work at once: with few parts a program takes many pairs, with many parts few.
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
    """Do one part's share of merging its block, `AT_ONCE` parts at a time."""
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
            # Bypass the L1 cache, which may hold an earlier layer's data.
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
